"""Facts about a machine and its GPU that decide how threed runs there, a line each, as they come.

    python -m bench.gpu.facts                # a minute
    python -m bench.gpu.facts --only attention_chosen,nccl
    python -m bench.gpu.facts --list

A fact that raises, crashes or hangs is a line that says so, and the next one is asked in a new process. The
exit status is 1 if there was one; what the machine does not have (no GPU, no compiler) is no failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import torch

from bench.gpu import facts_gpu, facts_host
from bench.gpu.apart import outcomes
from bench.gpu.fact import LIMIT_S, At, Fact, Missing

FACTS = (*facts_host.FACTS, *facts_gpu.FACTS)


def answers(facts: Sequence[Fact], at: At) -> Iterator[tuple[Fact, str, str, float]]:
    """Each fact with how it went ("", "none" or "FAILS"), what it says, and its seconds. Facts in a row share
    a process, but for those that want one alone."""
    def ask(fact: Fact) -> tuple[str, str]:
        try:
            if fact.gpu and at.device.type != "cuda":
                raise Missing("no GPU")
            return "", fact.ask(at)
        except Missing as error:
            return "none", str(error)

    numbers = {fact: index if fact.alone else -1 for index, fact in enumerate(facts)}
    for _, each in groupby(facts, numbers.__getitem__):
        group = list(each)
        for fact, outcome in zip(group, outcomes([partial(ask, fact) for fact in group], lambda: LIMIT_S),
                                 strict=True):
            how, text = outcome.value if outcome.failure is None else ("FAILS", outcome.failure)
            yield fact, how, text, outcome.seconds


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...",
                        help="these facts alone")
    parser.add_argument("--small", action="store_true", help="small tensors, to try the script")
    parser.add_argument("--list", action="store_true", help="name the facts")
    args = parser.parse_args(argv)
    names = [fact.name for fact in FACTS]
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"there is no fact {', '.join(unknown)}; there are {', '.join(names)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    chosen = [fact for fact in FACTS if args.only is None or fact.name in args.only]
    if args.list:
        print("\n".join(f"{fact.name:24} {(fact.ask.__doc__ or '').strip()}".rstrip() for fact in chosen))
        return 0
    there = next(outcomes([torch.cuda.is_available], lambda: LIMIT_S))
    at = At(torch.device("cuda", 0) if there.value else torch.device("cpu"), args.small)
    failed = []
    for fact, how, text, seconds in answers(chosen, at):
        print(f"{fact.name}: {f'{how}: ' if how else ''}{text} [{seconds:.1f} s]", flush=True)
        failed += [fact.name] * (how == "FAILS")
    print(f"{len(chosen)} facts, {len(failed)} fail{': ' if failed else ''}{', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

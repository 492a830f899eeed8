"""Generation: continue texts by the program `generate`, on all ranks together.

    prompts -> tokens of each text, on all ranks     (rank 0 encodes them: data/prompts)
    for each new token:
        the last `model.seq_len` tokens of each text are a sequence; the program makes the logits of its last
        the last position chooses a token of each text, and tells all ranks (one sum over the world)
    tokens -> text                                   (rank 0)

There is no cache of keys and values: each new token costs a forward of a whole sequence. A token is chosen by
a number that depends on the seed, the number of the prompt and the place of the token alone, so every mesh
writes the same text, as far as rounding lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from threed.base.axes import axes_of
from threed.base.errors import RunError, Stopped
from threed.base.hashing import splitmix64
from threed.data.sampling import Sampling
from threed.engine.engine import Engine
from threed.tensor.context import Batch


def choose(logits_V: torch.Tensor, how: Sampling, prompt: int, place: int) -> int:
    """A token of a text. `logits_V`: [vocabulary], without padding; `prompt`: the text's number; `place`: the
    number of tokens before. RunError where a logit is not finite.

    With top_p, the most likely tokens are kept whose probability reaches it (Holtzman et al. 2019); of these,
    in the order of their probability, the one is taken at which their sum passes a uniform number."""
    logits = logits_V.double().cpu()
    if not torch.isfinite(logits).all():
        raise RunError("a logit is not finite: the weights are broken; take a checkpoint from before they "
                       "were")
    if how.temperature == 0:
        return int(logits.argmax())
    shares, ids = (logits / how.temperature).softmax(0).sort(descending=True, stable=True)
    sums = shares.cumsum(0)
    kept = int((sums - shares < how.top_p).sum())  # at least one
    uniform = splitmix64(splitmix64(splitmix64(how.seed) + prompt) + place) / 2**64
    at = int(torch.searchsorted(sums[:kept], uniform * float(sums[kept - 1]), right=True))
    return int(ids[min(at, kept - 1)])


class Text(NamedTuple):
    """What was added to a prompt."""

    ids: list[int]
    ended: bool  # whether a token came that ends a text (which is not in `ids`)


class TextWriter:
    """Continues texts on the ranks of an engine whose plan has the program `generate`. All ranks make the
    same calls."""

    def __init__(self, engine: Engine, vocab: int, ends: Collection[int] = ()):
        """`vocab`: ids below it may be chosen. `ends`: tokens at which a text ends."""
        self._engine, self._vocab, self._ends = engine, vocab, ends
        table, here = engine.plan.table, engine.comm.here
        self._chooses = here.position == table.position(table.last) and here.is_first(axes_of("parameters"))
        self._places = engine.places()  # of a text, which has no documents

    def write(self, prompts: Sequence[Sequence[int]], how: Sampling,
              stop: Callable[[], bool] = lambda: False) -> list[Text]:
        """Continue prompts, each of 1 to model.seq_len tokens. Equal on all ranks. Raises Stopped once `stop`
        says so."""
        comm, texts, ended = self._engine.comm, [list(prompt) for prompt in prompts], set[int]()
        for _ in range(how.tokens):
            if stop():
                raise Stopped("stopped on request, while text was being generated")
            chosen = torch.zeros(len(texts), dtype=torch.int64)
            self._step(texts, ended, how, chosen)
            chosen = chosen.to(comm.device)
            comm.groups["world"].all_reduce(chosen).wait()
            for number, token in enumerate(chosen.tolist()):
                if number not in ended and token in self._ends:
                    ended.add(number)
                elif number not in ended:
                    texts[number].append(token)
            if len(ended) == len(texts):
                break
        return [Text(text[len(prompt):], number in ended)
                for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True))]

    def _step(self, texts: Sequence[Sequence[int]], ended: set[int], how: Sampling,
              chosen: torch.Tensor) -> None:
        """Run the program once, and write the tokens that this rank chooses into `chosen`."""
        logits = self._engine.generate(lambda microbatch: self._batch(texts, microbatch))
        for microbatch, logits_BV in logits.items() if self._chooses else ():
            for row, number in enumerate(self._numbers(microbatch)):
                if number < len(texts) and number not in ended and self._has_last(texts[number]):
                    chosen[number] = choose(logits_BV[row, :self._vocab], how, number, len(texts[number]))

    def _has_last(self, text: Sequence[int]) -> bool:
        """Whether this rank has the last token of a text, and so its logits."""
        return self._places.local(min(len(text), self._places.length) - 1) is not None

    def _numbers(self, microbatch: int) -> range:
        """The texts of a micro-batch of this rank. (Some may not exist: the last micro-batches are filled
        up.)"""
        config, here = self._engine.config, self._engine.comm.here
        first = (microbatch * config.dp + here.replica) * config.train.micro_batch_size
        return range(first, first + config.train.micro_batch_size)

    def _batch(self, texts: Sequence[Sequence[int]], microbatch: int) -> Batch:
        """The last tokens of each text, followed by zeros: attention is causal, so no token sees them."""
        config, numbers = self._engine.config, self._numbers(microbatch)
        tokens_BS = torch.zeros(len(numbers), config.model.seq_len, dtype=torch.int64)
        last_B = torch.zeros(len(numbers), dtype=torch.int64)
        for row, number in enumerate(numbers):
            if number < len(texts):
                window = texts[number][-config.model.seq_len:]
                tokens_BS[row, :len(window)] = torch.tensor(window)
                last_B[row] = len(window) - 1
        return Batch(tokens_BS, torch.zeros_like(tokens_BS), torch.tensor(numbers), config.train.seed,
                     config.tokens_per_step, train=False, last_B=last_B)

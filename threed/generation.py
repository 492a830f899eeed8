"""Generation: continue texts by the program `generate`, on all ranks together.

    prompts -> tokens of each text, on all ranks     (rank 0 encodes them)
    for each new token:
        the last `model.seq_len` tokens of each text are a sequence; the program makes the logits of its last
        the last position chooses a token of each text, and tells all ranks (one sum over the world)
    tokens -> text                                   (rank 0)

There is no cache of keys and values: each new token costs a forward of a whole sequence. A token is chosen by
a number that depends on the seed, the number of the prompt and the place of the token alone, so every mesh
writes the same text, as far as rounding lets it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from threed.data.samples import mix
from threed.engine.engine import Engine
from threed.errors import InputError, RunError, Stopped
from threed.mesh import axes_of
from threed.sampling import TOKENIZER, Sampling
from threed.schema import ModelConfig
from threed.tensor.context import Batch

if TYPE_CHECKING:
    from threed.data.tokenizer import Tokenizer


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
    uniform = mix(mix(mix(how.seed) + prompt) + place) / 2**64
    at = int(torch.searchsorted(sums[:kept], uniform * float(sums[kept - 1]), right=True))
    return int(ids[min(at, kept - 1)])


class Text(NamedTuple):
    """What was added to a prompt."""

    ids: list[int]
    ended: bool  # whether an end-of-text token came (which is not in `ids`)


class Writer:
    """Continues texts on the ranks of an engine whose plan has the program `generate`. All ranks make the
    same calls."""

    def __init__(self, engine: Engine, vocab: int, eod: int | None):
        """`vocab`: ids below it may be chosen. `eod`: the end-of-text token, at which a text ends."""
        self._engine, self._vocab, self._eod = engine, vocab, eod
        table, here = engine.plan.table, engine.comm.here
        self._chooses = here.position == table.position(table.last) and here.is_first(axes_of("parameters"))

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
                if number not in ended and token == self._eod:
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
                if number < len(texts) and number not in ended:
                    chosen[number] = choose(logits_BV[row, :self._vocab], how, number, len(texts[number]))

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


# ---------------------------------------------------------------- text


def keep_tokenizer(file: Path | None, folder: Path) -> list[str]:
    """Copy the tokenizer of a run's data to the folder of the run, which then can write text wherever it is
    moved. Returns warnings."""
    kept = folder / TOKENIZER
    try:
        if file is None:
            kept.unlink(missing_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, kept.with_name(f"{TOKENIZER}.tmp"))
            kept.with_name(f"{TOKENIZER}.tmp").replace(kept)  # no reader sees half of it
    except OSError as error:
        return [f"{kept} was not written: {error}; threed generate will need --tokenizer"]
    return []


def encode(tokenizer: Tokenizer, prompts: Sequence[str], model: ModelConfig) -> list[list[int]]:
    """Tokens of prompts. An empty one is an end-of-text token, after which a new document begins. InputError
    where a prompt is too long, or is not of the model's vocabulary."""
    encoded = tokenizer.encode_batch(list(prompts))
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        shown = f"prompt {number} ({prompt[:20]!r}{' ...' if len(prompt) > 20 else ''})"
        if not ids:
            if tokenizer.eod is None:
                raise InputError(f"{shown} has no tokens, and the tokenizer has no end-of-text token with "
                                 "which a text could begin: give a prompt")
            ids.append(tokenizer.eod)
        if len(ids) > model.seq_len:
            raise InputError(f"{shown} has {len(ids)} tokens, and the model sees model.seq_len="
                             f"{model.seq_len}: shorten it")
        if max(ids) >= model.vocab:
            raise InputError(f"{shown} has token {max(ids)}, but model.vocab={model.vocab} allows 0 to "
                             f"{model.vocab - 1}: the tokenizer is not the one of the run's data")
    return encoded


def added(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of tokens that were added to a prompt. (Decoded together: a character may have tokens on both
    sides.)"""
    before, whole = tokenizer.decode(list(prompt)), tokenizer.decode([*prompt, *ids])
    return whole[len(before):] if whole.startswith(before) else tokenizer.decode(list(ids))

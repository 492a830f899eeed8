"""The program `generate`: every mesh writes the text of the plain model; and how tokens are chosen."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from tests.data.files import word_level
from tests.harness import batches, tiny
from tests.reference import Reference
from threed.base.errors import InputError, RunError
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.data.prompts import added, encode, keep_tokenizer
from threed.data.run_tokenizer import kept_for, tokenizer_digest
from threed.data.sampling import Sampling
from threed.data.tokenizer import load
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.gradient import Accumulated
from threed.models.layers.base import Out
from threed.planner import forward_plan, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.names import GENERATE
from threed.program.plan import Plan
from threed.program.traffic import sent_by
from threed.schema import Config, DataConfig, ModelConfig
from threed.tensor.context import Batch
from threed.training.generation import Text, TextWriter, choose

SMALL = ["model.layers=3", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "model.init_std=0.3", "train.sample_prompts=[a,b,c]"]
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8]]
MESHES = {
    "tp": ["parallel.tp=2"],
    "sp": ["parallel.tp=2", "parallel.sequence_parallel=true", "model.tie_embeddings=false"],
    "pp": ["parallel.pp=2"],
    "cp": ["parallel.cp=2"], "cp-heads": ["parallel.cp=2", "parallel.cp_form=heads"],
    "cp-overlap": ["parallel.cp=2", "parallel.cp_overlap=true"],
    "cp-sp": ["parallel.cp=4", "parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true"],
    "v": ["parallel.pp=2", "parallel.schedule=zb-v"],
    "interleaved": ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    "zero-3": ["parallel.dp=2", "zero.stage=3"],
    "batched": ["parallel.dp=2", "train.micro_batch_size=2", "zero.stage=1"],
    "tiles": ["parallel.tp=2", "parallel.dp=2", "zero.stage=3", "model.tile_linears=1KiB", "model.vocab=60",
              "model.tie_embeddings=false"],
    "all": ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "zero.stage=3"],
}
CORE = ("tp", "pp", "cp", "zero-3", "tiles")


def written(config: Config, how: Sampling, plan: Plan | None = None,
            ends: tuple[int, ...] = ()) -> list[Text]:
    """The texts, which all ranks must agree on."""
    plan = plan or forward_plan(config, GENERATE)

    def work(comm: Comm) -> list[Text]:
        engine = Engine(Analysis(plan), comm)
        try:
            return TextWriter(engine, config.model.vocab, ends).write(PROMPTS, how)
        finally:
            engine.close()

    results = run_loopback(plan, make_mesh(config), work)
    assert all(each == results[0] for each in results)
    return results[0]


def plainly(config: Config, how: Sampling) -> list[list[int]]:
    """The texts of the plain model: one sequence at a time, padded by other tokens."""
    with initialized(), torch.no_grad():
        *layers, head = Reference(config).layers
        texts = []
        for number, prompt in enumerate(PROMPTS):
            text = list(prompt)
            for _ in range(how.tokens):
                window = text[-config.model.seq_len:]
                tokens = torch.full((1, config.model.seq_len), 7)
                tokens[0, :len(window)] = torch.tensor(window)
                batch = Batch(tokens, tokens, torch.tensor([0]), 0, 1, train=False)
                x = None
                for layer in layers:
                    out = layer(x, batch)
                    x = out.x if isinstance(out, Out) else out
                logits = head.output(head.norm(x))[len(window) - 1, 0, :config.model.vocab]
                text.append(choose(logits, how, number, len(text)))
            texts.append(text[len(prompt):])
    return texts


@pytest.mark.parametrize("mesh", [pytest.param(mesh, marks=pytest.mark.core if mesh in CORE else ())
                                  for mesh in MESHES])
def test_every_mesh_writes_the_text_of_the_plain_model(mesh):
    """A token of another sequence, position, tile or tp rank; a window that does not move."""
    config = tiny(*SMALL, *MESHES[mesh])
    for how in (Sampling(9, 0.0), Sampling(9, 1.5, 0.9, seed=3)):
        texts = written(config, how)
        assert [text.ids for text in texts] == plainly(config, how)
        assert not any(text.ended for text in texts)
    assert len({token for text in texts for token in text.ids}) > 5  # it is no constant


def test_a_run_that_trains_writes_between_its_steps():
    """Text of weights before a step, or a step that the program has disturbed."""
    config = tiny(*SMALL, "parallel.pp=2", "parallel.dp=2", "zero.stage=2", "train.sample_every=1",
                  "optimizer.lr=0.1")
    plan, how = make_plan(config), Sampling(3, 0.0)

    def work(comm: Comm, writes: bool) -> tuple[list[float], list[list[Text]]]:
        engine, texts, losses = Engine(Analysis(plan), comm), [], []
        for step in range(3):
            losses.append(engine.train_step(batches(config, comm, step))[0].loss)
            if writes:
                texts.append(TextWriter(engine, config.model.vocab).write(PROMPTS, how))
        engine.close()
        return losses, texts

    with_text, without = (run_loopback(plan, make_mesh(config), lambda comm, on=on: work(comm, on))[0]
                          for on in (True, False))
    assert with_text[0] == without[0]
    assert with_text[1][0] != with_text[1][2]
    alone = tiny(*SMALL, "optimizer.lr=0.1", "zero.stage=0", "train.sample_every=1", "train.steps=5")

    def one(comm: Comm) -> list[list[Text]]:
        engine, texts = Engine(Analysis(make_plan(alone)), comm), []
        for step in range(3):
            engine.train_step(batches(alone, comm, step))
            texts.append(TextWriter(engine, alone.model.vocab).write(PROMPTS, how))
        return texts

    assert run_loopback(make_plan(alone), make_mesh(alone), one)[0] == with_text[1]


def test_a_text_ends_at_its_end_of_text_token():
    config = tiny(*SMALL)
    free = written(config, Sampling(9, 0.0))
    ends = free[0].ids[4], free[1].ids[5]  # of a text, of a turn
    ended = written(config, Sampling(9, 0.0), ends=ends)
    for text, before in zip(ended, free, strict=True):
        at = next((place for place, token in enumerate(before.ids) if token in ends), None)
        assert text == Text(before.ids[:at], at is not None)
    assert ended[0].ended


def test_ranks_that_train_nothing_have_no_gradients():
    config = tiny(*SMALL, "optimizer.name=sgd")
    plan = forward_plan(config, GENERATE)

    def work(comm: Comm) -> bool:
        states = Engine(Analysis(plan), comm).states.values()
        return all(state.gradient.accumulated is Accumulated.NOTHING and not state.gradient.shard.numel()
                   and not state.optimizer_state.buffers for state in states)

    assert run_loopback(plan, make_mesh(config), work) == [True]


@pytest.mark.parametrize("mesh", ["sp", "pp", "tiles"])
def test_the_plan_counts_what_the_program_sends(mesh):
    """Bytes by axis, as the plan says and as comm has counted."""
    config = tiny(*SMALL, *MESHES[mesh])
    plan = forward_plan(config, GENERATE)

    def work(comm: Comm) -> tuple[int, Counter[str]]:
        engine = Engine(Analysis(plan), comm)
        writer = TextWriter(engine, config.model.vocab)
        engine.generate(lambda microbatch: writer._batch(PROMPTS, microbatch))
        engine.close()
        return comm.here.position, Counter(comm.sent)

    for position, sent in run_loopback(plan, make_mesh(config), work):
        want = Counter[str]()
        for item in plan.programs[GENERATE][position]:
            want.update(sent_by(plan.table, item))
        assert +sent == +want


def test_choose_keeps_to_the_probabilities():
    """Frequencies of a distribution, of its most likely part (top_p), and of one that is flattened."""
    shares = torch.tensor([0.05, 0.5, 0.15, 0.3])
    for temperature, top_p, want in ((1.0, 1.0, shares), (1.0, 0.79, torch.tensor([0, 0.625, 0, 0.375])),
                                     (2.0, 1.0, shares.sqrt() / shares.sqrt().sum()),
                                     (1.0, 1e-9, torch.tensor([0.0, 1, 0, 0]))):
        how = Sampling(1, temperature, top_p, seed=5)
        seen = Counter(choose(shares.log(), how, prompt, place)
                       for prompt in range(40) for place in range(100))
        got = torch.tensor([seen[token] / 4000 for token in range(4)])
        assert (got - want).abs().max() < 4 * 0.5 / math.sqrt(4000), (temperature, top_p, got)
    assert choose(shares.log(), Sampling(temperature=0), 0, 0) == 1


def test_choose_depends_on_seed_prompt_and_place():
    logits = torch.zeros(1000)
    base = choose(logits, Sampling(seed=1), 0, 0)
    assert base == choose(logits, Sampling(seed=1), 0, 0)
    assert len({base, choose(logits, Sampling(seed=2), 0, 0), choose(logits, Sampling(seed=1), 1, 0),
                choose(logits, Sampling(seed=1), 0, 1)}) == 4


def test_broken_weights_are_named():
    with pytest.raises(RunError, match="not finite"):
        choose(torch.tensor([0.0, math.nan]), Sampling(), 0, 0)


@pytest.mark.parametrize(("how", "text"), [
    (Sampling(tokens=0), "max_tokens=0"), (Sampling(temperature=-1.0), "temperature=-1.0"),
    (Sampling(temperature=math.nan), "temperature=nan"), (Sampling(top_p=0.0), "top_p=0.0"),
    (Sampling(top_p=1.5), "top_p=1.5"), (Sampling(seed=-1), "seed=-1")])
def test_numbers_that_make_no_sense(how, text):
    with pytest.raises(InputError, match=text):
        how.check()


class Letters:
    """A tokenizer of letters: a is 1."""

    def __init__(self, eod: int | None = 0):
        self.eod, self.vocab_size = eod, 27

    def read_special_tokens(self) -> None:
        pass

    def begun(self, ids: list[int]) -> list[int]:
        return [19, *ids]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(letter) - 96 for letter in text] for text in texts]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + each) for each in ids)


def test_prompts():
    model = ModelConfig(seq_len=4, vocab=20)
    data = DataConfig()
    assert encode(Letters(), ["abcd", ""], data, model) == ([[1, 2, 3, 4], [0]], 20, (0,))  # pyright: ignore
    assert encode(Letters(None), ["ab"], data, model).ends == ()  # pyright: ignore
    data.prepend_bos = True
    assert encode(Letters(), ["ab", ""], data, model).ids == [[19, 1, 2], [19]]  # pyright: ignore
    data.prepend_bos = False
    for tokenizer, prompts, text in ((Letters(), ["a", "abcde"], "prompt 1 .'abcde'. has 5 tokens"),
                                     (Letters(None), [""], "no end-of-text token"),
                                     (Letters(), ["az"], "has token 26")):
        with pytest.raises(InputError, match=text):
            encode(tokenizer, prompts, data, model)  # pyright: ignore
    assert added(Letters(), [1, 2], [3]) == "c"  # pyright: ignore


def test_the_tokenizer_is_kept_with_the_run(tmp_path):
    file = word_level(tmp_path / "given.json", "é", "</s>")
    data, run = DataConfig(tokenizer=str(file)), tmp_path / "run"
    assert keep_tokenizer(file, data, run) == []
    assert [each.name for each in run.iterdir()] == ["tokenizer.json"]
    assert (run / "tokenizer.json").read_bytes() == file.read_bytes()
    (tmp_path / "mine.jinja").write_text("{{ 1 }}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    data.chat_template = str(tmp_path / "mine.jinja")
    assert keep_tokenizer(file, data, run) == []
    assert (run / "chat_template.jinja").read_text() == "{{ 1 }}"
    assert (run / "tokenizer_config.json").is_file()
    assert keep_tokenizer(None, data, run) == []  # the data have none; older checkpoints have
    assert (run / "tokenizer.json").read_bytes() == file.read_bytes()
    kept = (run / "tokenizer.json").read_bytes()
    file.write_text('{"model": {"vocab": {"a": 0}}}')
    (said,) = keep_tokenizer(file, data, run)
    (other,) = run.glob("tokenizer-*")
    assert (run / "tokenizer.json").read_bytes() == kept and f"is kept in {other}" in said
    assert {each.name for each in other.iterdir()} == {"tokenizer.json", "chat_template.jinja",
                                                       "tokenizer_config.json"}
    assert keep_tokenizer(file, data, run) == []  # it was said before
    for text, home in (("é {}", run), ('{"model": {"vocab":   {"a":0}}, "padding": 1}', other)):
        file.write_text(text)
        assert kept_for(run, tokenizer_digest(file)) == home
    (warning,) = keep_tokenizer(tmp_path / "none.json", data, run)
    assert "was not written" in warning


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_of_text_token_is_kept_with_the_run(name, tmp_path):
    """Whether or not the file that names it is one that a run keeps."""
    file, run = word_level(tmp_path / "given.json", "a", "</s>", "<end>"), tmp_path / "run"
    (tmp_path / name).write_text('{"eos_token": "<end>"}')
    assert keep_tokenizer(file, DataConfig(tokenizer=str(file)), run) == []
    assert load(run / "tokenizer.json").eod == 2

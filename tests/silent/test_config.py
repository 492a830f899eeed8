"""Rows 8 to 12 of docs/silent-faults.md: what a config and an environment say, and what is done about it."""

from __future__ import annotations

import itertools
import json
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.data.files import word_level
from tests.harness import SETTINGS, batches, loopback, same_bits, tiny
from tests.plan.test_silent_faults import ROOT, functions, kept_out
from tests.reference import learning_rate
from tests.running import Run, metrics
from tests.silent.keys import KEYS, LOOKED_AT, OUTPUT, SHOWN_BY, config_of, outputs
from threed.base.errors import InputError, ThreedError
from threed.comm.environment import place_of_environment
from threed.comm.group import Comm
from threed.comm.rendezvous import FAILURE, interface_variables, meet
from threed.config.load import known_keys
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.gradient import Accumulated
from threed.features.zero.run import ZeroRun
from threed.optim import step as optimizer
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op
from threed.schema import OptimizerConfig

SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16"]
TINY_RUN = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=16", "model.heads=2",
            "model.seq_len=16", "model.vocab=300", "train.global_batch_size=2", "train.micro_batch_size=1",
            "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0", "parallel.dp=1",
            "parallel.tp=1", "parallel.pp=1"]

# ---------------------------------------------------------------- 8: rates that are changed

BEFORE = {"lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "warmup_steps": 2, "decay_steps": 20}
CHANGES = {"lr": 2e-2, "min_lr": 8e-3, "weight_decay": 0.4, "warmup_steps": 8, "decay_steps": 10,
           "schedule": "cosine"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory, cache):
    """A run of 8 steps, saved after 2."""
    folder = tmp_path_factory.mktemp("rates")
    run = Run(folder, *TINY_RUN, *cache, *rates({}), f"run.dir={folder / 'run'}", "train.steps=8",
              "checkpoint.every=2", "checkpoint.keep=0")
    assert run.wait() == 0, run.output
    return folder / "run"


def rates(changes: dict) -> list[str]:
    values = {**BEFORE, "schedule": "linear", **changes}
    return [f"optimizer.{name}={value}" for name, value in values.items()]


@pytest.mark.parametrize("key", [*CHANGES, "nothing"])
def test_the_config_wins_over_the_checkpoint(key, saved, begin, tmp_path):
    """Another rate, and the run goes on: the learning rate of the next steps is the new config's, at the step
    where the run is; nothing of the checkpoint's comes back. And it is said, once for each key that differs:
    a run whose rates are not those that one has in mind looks like any other."""
    changes = {key: CHANGES[key]} if key in CHANGES else {}
    run = begin(TINY_RUN, *rates(changes), "train.steps=8",
                f"train.resume={saved / 'checkpoints' / 'step-00000002'}")
    assert run.wait() == 0, run.output
    wanted = OptimizerConfig(**{**BEFORE, "schedule": "linear", **changes})
    rows = {row["step"]: row["train/lr"] for row in metrics(tmp_path / "run")}
    assert rows == pytest.approx({step: learning_rate(wanted, step - 1, 8) for step in range(3, 9)})
    losses = [[row["train/loss"] for row in metrics(path) if row["step"] > 2]
              for path in (saved, tmp_path / "run")]
    assert (losses[0] == losses[1]) == (key == "nothing")
    said = [line for line in run.output.splitlines() if "note: optimizer." in line]
    assert [line.split(" was ")[0] for line in said] == [f"note: optimizer.{each}" for each in changes]


# ---------------------------------------------------------------- 9: one count of updates

UNITS = {"one": [], "two": ["parallel.layers_per_unit=2"], "all": ["parallel.layers_per_unit=4"]}
TILED = ["model.tile_linears=1KiB", "model.tie_embeddings=false"]


@pytest.mark.parametrize("others", [[*UNITS["one"]], UNITS["two"], UNITS["all"], TILED],
                         ids=["units", "larger-units", "one-unit", "tiles"])
def test_one_count_of_updates(others, monkeypatch):
    """Adam's count of each part, on each rank, in each step: the number of the step, whatever the ratio that
    is offloaded and where to; a step that is skipped counts nowhere. And so the weights have the same
    bits."""
    counts: list[tuple[int, int]] = []
    right = optimizer.step

    def step(by, view, copy=None):
        counts.append((by.number, len(view.weight)))
        right(by, view, copy)

    monkeypatch.setattr(optimizer, "step", step)
    runs = []
    for where, ratio in [("none", 1.0), ("cpu", 0.1), ("nvme", 0.5), ("cpu", 1.0)]:
        counts.clear()
        config = tiny(*SMALL, "model.layers=4", "parallel.dp=2", "zero.stage=2", "parallel.pp=2",
                      f"offload.ratio={ratio}" if where != "none" else "offload.ratio=1",
                      "zero.reduce_every=step", "train.global_batch_size=4", *SETTINGS["offload"][where],
                      *others)
        runs.append(loopback(config, 4))
        by_step = {number: sum(size for each, size in counts if each == number) for number, _ in counts}
        assert set(by_step) == {1, 2, 3, 4} and len(set(by_step.values())) == 1
    same_bits(runs)


def test_units_have_the_same_bits():
    """Larger units are stepped in fewer parts, to the same weights. (Norms are sums by unit, and so may
    differ in their last bit.)"""
    one, *rest = (loopback(tiny(*SMALL, "model.layers=4", "parallel.dp=2", "offload.optimizer=cpu",
                                *others), 4) for others in UNITS.values())
    for each in rest:
        assert each.losses == one.losses
        assert all(torch.equal(each.weights[name], value) for name, value in one.weights.items())


@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_a_skipped_step_counts_nowhere(offload):
    config = tiny(*SMALL, "parallel.dp=2", "precision.dtype=fp16", "precision.initial_loss_scale=67108864",
                  "precision.hysteresis=1", *SETTINGS["offload"][offload],
                  *(["offload.ratio=0.5"] if offload != "none" else []))
    plan = make_plan(config)

    def work(comm: Comm) -> list[tuple[bool, int]]:
        engine = Engine(Analysis(plan), comm)
        return [(engine.train_step(batches(config, comm, step))[0].finite, engine.zero.updates)
                for step in range(16)]

    for seen in run_loopback(plan, make_mesh(config), work):
        assert not seen[0][0] and seen[-1][0]
        assert [count for _, count in seen] == list(itertools.accumulate(finite for finite, _ in seen))


# ---------------------------------------------------------------- 10: every key does something


def test_every_key_has_a_trial():
    """A key that nobody has shown to matter: give it a line in tests/silent/keys.py."""
    assert {*KEYS, *OUTPUT} == set(known_keys()) and not KEYS.keys() & OUTPUT.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of several kinds."""
    folder = tmp_path_factory.mktemp("keys")
    words = "abcdefgh"
    for name, step in (("one", 3), ("other", 5)):
        lines = [" ".join(words[(line * step + at) % 8] for at in range(3 + line % 30))
                 for line in range(400)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in lines))
    rows = [{"prompt": f"{words[n % 8]} b c", "answer": f"d {words[(n * 3) % 8]}",
             "text": f"{words[n % 7]} a g h"} for n in range(600)]
    talks = [{name: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[what]}]
              for name, what in (("messages", "answer"), ("others", "text"))} for row in rows]
    for name, lines in (("answers", rows), ("chat", talks)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, end in (("chat", "<|im_end|>"), ("other", "<end>")):
        (folder / f"{name}.jinja").write_text(
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '" + end
            + "' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    word_level(folder / "words.json", "?", *words, "<|endoftext|>")
    return folder


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("key", LOOKED_AT)
def test_another_value_changes_something(key, folder, usual):
    look, where, value = LOOKED_AT[key]
    text = f"{key}={json.dumps(value) if isinstance(value, list) else value}"
    if (id(look), *where) not in usual:
        usual[id(look), *where] = look(config_of(where, folder), folder)
    assert look(config_of([*where, text], folder), folder) != usual[id(look), *where]


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("key", ["model.layers", "optimizer.lr", "data.source", "train.sample_every"])
def test_what_is_looked_at_is_steady(key, folder):
    """Numbers that differ by themselves would hide a key that does nothing."""
    look, where, _ = LOOKED_AT[key]
    assert look(config_of(where, folder), folder) == look(config_of(where, folder), folder)


@pytest.fixture(scope="module")
def usual():
    """What has been looked at, for keys that share it."""
    return {}


def test_a_whole_run_shows_the_others(tmp_path, cache):
    seen = outputs(tmp_path, *cache)
    assert not [(key, before) for key, (before, after) in seen.items() if before == after]


@pytest.mark.parametrize("key", SHOWN_BY)
def test_the_trial_of_a_key_is_there(key):
    path, _, name = SHOWN_BY[key].partition("::")
    text = (ROOT / path).read_text()
    assert not kept_out(ROOT / path, functions(ROOT / path)[name])
    assert key in text or f".{key}" in text or key.split(".")[1] in text


# ---------------------------------------------------------------- 11: one of several, or alone

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(("env", "words"), [
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is in the environment, but not RANK"),
    ({"RANK": "1"}, "RANK=1 is in the environment, but not WORLD_SIZE"),
    ({"RANK": "0"}, "RANK=0 is in the environment, but not WORLD_SIZE"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is in the environment, but not RANK and WORLD_SIZE"),
    ({"LOCAL_RANK": "1", "RANK": "1"}, "but not WORLD_SIZE"),
    ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, "but not RANK"),
    ({**PLACE, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4 in the environment contradict"),
    ({**PLACE, "RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
     "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 in the environment contradict"),
    ({**PLACE, "RANK": "1", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 and RANK . 1=2 in the environment contradict"),
    ({**PLACE, "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 and WORLD_SIZE=4 in the environment contradict"),
    ({**PLACE, "RANK": "-1"}, "RANK=-1 in the environment must be a whole number"),
    ({**PLACE, "WORLD_SIZE": ""}, "WORLD_SIZE= in the environment must be a whole number"),
    ({**PLACE, "WORLD_SIZE": "4.0"}, "WORLD_SIZE=4.0 in the environment must be a whole number"),
    ({"WORLD_SIZE": "four"}, "WORLD_SIZE=four in the environment must be a whole number"),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE=4 is in the environm"),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE=2 is in the environment: mpirun has started"),
    ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, "MASTER_ADDR must name the first node")], ids=str)
def test_an_environment_that_is_half(env, words):
    """A process that is one of several, and would train alone."""
    with pytest.raises(InputError, match=words):
        place_of_environment(env)


@pytest.mark.parametrize("env", [{}, {"WORLD_SIZE": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"},
                                 {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}], ids=str)
def test_a_process_that_is_alone(env):
    assert place_of_environment(env) is None


@pytest.mark.parametrize(("env", "words"), [
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is in the environment, but not RANK"),
    ({**PLACE, "RANK": "5"}, "RANK=5 and WORLD_SIZE=4 in the environment contradict"),
    ({**PLACE, "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}, "= 4 processes, but the world size is 3")])
def test_a_half_environment_ends_a_run_at_once(env, words, begin):
    begun = time.monotonic()
    run = begin(TINY_RUN, "parallel.tp=2", "parallel.pp=2", "parallel.dp=1", env=env)
    assert run.wait(30) == 2 and words in run.output and "Traceback" not in run.output, run.output
    assert run.output.count("threed: ") == 1 and "step" not in run.output, run.output
    assert time.monotonic() - begun < 30


def test_two_processes_with_one_number(monkeypatch):
    """Ranks 0, 1 and 1 of 3: all end in seconds, and one says why; none waits for rank 2 until the limit."""
    for name in (*interface_variables("127.0.0.1"), "LOCAL_ADDR"):
        monkeypatch.setenv(name, "to be put back")
    monkeypatch.setenv("LOCAL_ADDR", "127.0.0.1")
    server, said = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), []

    def body(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60))
        try:
            meet(store, rank, 3, ("127.0.0.1", server.port))
        except ThreedError as error:
            store.compare_set(FAILURE, "", json.dumps({"message": str(error)}))
            said.append(str(error))

    threads = [threading.Thread(target=partial(body, rank), daemon=True) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(said) == 3 and all("RANK=1 in the environment of two processes" in text for text in said)


# ---------------------------------------------------------------- 12: a NaN that nobody logs


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_nan_changes_nothing(stage, offload, tmp_path):
    """One element of one gradient on one rank: no weight and no state of the optimizer changes on any rank,
    and the next step is as if the step had not been."""
    config = tiny(*SMALL, "parallel.dp=2", "parallel.pp=2", f"zero.stage={stage}",
                  *SETTINGS["offload"][offload])
    plan = make_plan(config)

    def work(comm: Comm) -> list[bool]:
        engine = Engine(Analysis(plan), comm)
        bad, reduce = [], engine.handlers[Op.REDUCE]
        engine.train_step(batches(config, comm, 0))

        def poisoned(instruction, slots):
            gradient = engine.states[instruction.unit].gradient
            if comm.rank == 1 and gradient.accumulated is Accumulated.WHOLE:
                gradient.whole()[0] = torch.nan
            return reduce(instruction, slots)

        def now() -> list[torch.Tensor]:
            engine.settle()
            return [torch.clone(each) for state in engine.states.values()
                    for each in (state.optimizer_state.master, *state.optimizer_state.buffers.values())]

        kept, engine.handlers[Op.REDUCE] = now(), poisoned
        bad.append(engine.train_step(batches(config, comm, 1))[0].finite)
        bad.append(not all(map(torch.equal, kept, now())))
        engine.handlers[Op.REDUCE] = reduce
        bad.append(not engine.train_step(batches(config, comm, 2))[0].finite)
        engine.close()
        return bad

    assert run_loopback(plan, make_mesh(config), work) == [[False] * 3] * 4


@pytest.mark.parametrize("what", ["stop", "skip"])
def test_a_nan_at_a_step_that_is_not_logged(what, begin, monkeypatch, tmp_path):
    """No line on the console for 100 steps, no trace, and a NaN in step 3: the run ends and names the step,
    or leaves it out and counts it."""
    reduce = ZeroRun.reduce

    def poisoned(self, instruction, slots):
        if self.step_number == 2 and self.comm.rank == 1:
            self.states[instruction.unit].gradient.whole()[0] = torch.nan
        return reduce(self, instruction, slots)

    monkeypatch.setattr(ZeroRun, "reduce", poisoned)
    run = begin(TINY_RUN, "parallel.dp=2", "train.steps=6", "monitor.console_every=100",
                f"train.on_nonfinite={what}")
    assert run.wait() == (1 if what == "stop" else 0), run.output
    assert "step 3: not finite" in run.output
    rows = metrics(tmp_path / "run")
    if what == "stop":
        assert "No weight has changed for it" in run.output and rows[-1]["step"] == 2
    else:
        assert [row["train/skipped_steps"] for row in rows] == [0, 0, 1, 1, 1, 1]
        assert [row["step"] for row in rows if row["train/grad_norm"] == "nan"] == [3]

"""What went wrong on GPUs alone, inside a run: each on fake GPUs. (The functions without `test` run in a
process that has them.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import FILES, assert_contract, batches, cell_config, covering, loopback, same_bits, tiny
from tests.loopback.test_checkpoint import at, manifest, on_ranks, saved_after, step
from tests.loopback.test_documents import of_2_13
from tests.loopback.test_verify import twice, verified
from threed.base.errors import RunError
from threed.checkpoint import load
from threed.checkpoint.load import resume
from threed.comm.group import Comm
from threed.engine.device import attention, set_up, shortcomings
from threed.engine.engine import Engine
from threed.features.zero.gradient import Reduced
from threed.program.instruction import Op
from threed.schema import Config

SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16"]
DP, CPU = ["parallel.dp=2"], ["zero.stage=2", "offload.optimizer=cpu"]
NVME = ["zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme", FILES]
CELLS = [cell for cell in covering() if cell.offload != "none"]


# ---------------------------------------------------------------- steps that are computed twice


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id) for cell in CELLS[::10]])
def test_a_step_whose_gradients_go_to_the_host_is_verified(cell, fake_gpus):
    """Checksums of some results are made on the host, of the others on the device."""
    config = cell_config(cell, ranks=8)
    same_bits([fake_gpus.run(loopback, config, 2), fake_gpus.run(verified, twice(config), 2)])


def wrong_on_the_host(config: Config) -> str:
    """What a verified step says where one gradient on the host is wrong the second time."""
    def broken(engine: Engine) -> None:
        clip, calls = engine.handlers[Op.CLIP], []

        def handler(instruction: Any, slots: Any) -> Any:
            made = clip(instruction, slots)
            calls.append(instruction)
            if engine.comm.rank == 1 and len(calls) == 2:
                engine.states[4].gradient.values[5] += 1.0
            return made

        engine.handlers[Op.CLIP] = handler

    try:
        verified(config, 1, broken)
    except RunError as error:
        return str(error)
    return ""


def test_a_wrong_gradient_on_the_host_is_named(fake_gpus):
    said = fake_gpus.run(wrong_on_the_host, tiny(*SMALL, *DP, *CPU, "run.verify_every=1"))
    assert "step 1 was computed twice" in said and "of the gradient of p4" in said and "rank 1" in said


# ---------------------------------------------------------------- threads, and another stream


def on_another_stream(engine: Engine) -> None:
    """Let the computation leave the default stream, as it does with run.cuda_graphs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(stream)


def saved(config: Config, aside: bool) -> Path:
    if aside:
        init = Engine.__init__

        def made(self: Engine, *arguments: Any, **options: Any) -> None:
            init(self, *arguments, **options)
            on_another_stream(self)

        Engine.__init__ = made  # pyright: ignore[reportAttributeAccessIssue]
    return saved_after(config, 2)


@pytest.mark.parametrize("others", [
    ["checkpoint.background=false"], ["checkpoint.background=false", "precision.dtype=bf16"],
    [*NVME, "offload.ratio=0.5"], ["zero.stage=3"]], ids=lambda others: "-".join(others[:2]))
def test_a_checkpoint_has_the_weights_of_its_step(others, fake_gpus, tmp_path):
    """The thread that writes it reads them after STEP."""
    paths = [fake_gpus.run(saved, at(tmp_path / str(aside), *DP, *others), aside) for aside in (True, False)]
    mine, theirs = ({name: entry["sums"] for name, entry in manifest(path)["parameters"].items()}
                    for path in paths)
    assert mine == theirs


def resumed(config: Config) -> list[float]:
    """Losses of the steps after a checkpoint, without the proof that happens to wait for what was read."""
    load._prove = lambda *_: None

    def work(engine: Engine, comm: Comm) -> list[float]:
        on_another_stream(engine)
        assert resume(config, engine.zero).path is not None
        return step(engine, comm, 2)

    return on_ranks(config, work)[0]


def losses(config: Config, steps: int) -> list[float]:
    return on_ranks(config, lambda engine, comm: step(engine, comm, steps))[0]


@pytest.mark.parametrize("others", [[], ["precision.dtype=bf16", "zero.stage=3"]], ids=str)
def test_a_run_goes_on_with_what_was_read(others, fake_gpus, tmp_path):
    config = at(tmp_path, *DP, *others, "checkpoint.background=false")
    fake_gpus.run(saved, config, False)
    assert fake_gpus.run(resumed, config) == fake_gpus.run(losses, config, 4)[2:]


# ---------------------------------------------------------------- what a step asks of the host


def waits(config: Config, steps: int) -> None:
    loopback(config, steps)


@pytest.mark.parametrize("others", [[], [*DP, "zero.stage=1"], ["parallel.pp=2", "parallel.tp=2"]], ids=str)
def test_the_host_waits_for_no_step(others, fake_gpus):
    """Not for CLIP's numbers, either; and it copies nothing to the device for which it must wait."""
    config = tiny(*SMALL, *others)
    few, more = (fake_gpus.outcome(waits, config, steps).counts for steps in (2, 5))
    for what in more:
        if "synchronisations" in what or what in ("pageable copies", "blocking copies", "numbers read"):
            assert more[what] == few.get(what, 0), what


# ---------------------------------------------------------------- memory of sums on the host


def taken_by_a_sum(config: Config) -> tuple[int, float]:
    """Bytes that the allocator hands out while a gradient is added to what the host has, and the error of the
    sum."""
    def work(engine: Engine, comm: Comm) -> tuple[int, float]:
        engine.train_step(batches(config, comm, 0))
        state = max(engine.states.values(), key=lambda state: state.part.count)
        gradient = state.gradient
        gradient.shard, gradient.reduced = engine.storage.gshards.take(state.part.count), Reduced.BOTH
        gradient.shard.fill_(2.0)
        torch.cuda.synchronize()
        want = gradient.host + 2.0
        add = gradient.offload()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        add()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.synchronize()
        return peak - before, (gradient.host - want).abs().max().item()

    return on_ranks(config, work)[0]


ADDS = [*CPU, "offload.gradients=host", "zero.reduce_every=1"]


@pytest.mark.parametrize("others", [
    ADDS, [*ADDS, "precision.dtype=bf16", "precision.grad_dtype=bf16"]], ids=str)
def test_a_sum_on_the_host_takes_no_memory_that_no_plan_counts(others, fake_gpus):
    taken, error = fake_gpus.run(taken_by_a_sum, tiny(*SMALL, *others, "train.global_batch_size=4"))
    assert taken == 0 and error == 0.0


# ---------------------------------------------------------------- documents


def with_varlen() -> list[int]:
    """Let torch have its kernel for documents here. Returns a list of its calls."""
    from torch.nn.attention import varlen

    calls: list[int] = []

    def kernel(*arguments: Any, **others: Any) -> torch.Tensor:
        calls.append(len(arguments[0]))
        return of_2_13(*arguments, **others)

    varlen.varlen_attn = kernel
    return calls


def chosen(config: Config, has: bool) -> tuple[str, list[str], bool]:
    if has:
        with_varlen()
    set_up(config)
    device = torch.device("cuda", 0)
    return attention(config, device), shortcomings(config, device), torch.backends.cuda.cudnn_sdp_enabled()


def documents(config: Config, steps: int) -> tuple[Any, int]:
    calls = with_varlen()
    return loopback(config, steps), len(calls)


MASK = [*SMALL, "data.document_mask=true"]


def test_documents_take_one_kernel_where_it_can_run(fake_gpus):
    """Whatever torch chooses for sequences without documents; and the log says where they do not."""
    config = tiny(*MASK, "model.kv_heads=2", "model.fused=off")
    name, lines, cudnn = fake_gpus.run(chosen, config, True)
    assert name == "varlen" and not lines and not cudnn
    name, lines, cudnn = fake_gpus.run(chosen, config, False)
    assert name == "math" and any("each document is a call of attention" in line for line in lines)
    assert fake_gpus.run(chosen, tiny(*SMALL), True)[::2] == ("math", True)


@pytest.mark.parametrize("others", [[], [*DP, "zero.stage=3", "model.kv_heads=2"]], ids=str)
def test_documents_by_one_kernel(others, fake_gpus, references):
    calls = []

    def run(*arguments: Any) -> Any:
        ranks, count = fake_gpus.run(documents, *arguments)
        calls.append(count)
        return ranks

    assert_contract(tiny(*MASK, *others), references, run, steps=2)
    assert calls[0] > 10

"""Prices known before a run: `threed memory`, `threed matrix`, and what a machine costs."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import threed
from threed.base.errors import ConfigError, InputError
from threed.cli.main import app
from threed.config import contract
from threed.config.load import load
from threed.planner import make_plan
from threed.prediction.advise import measure
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.contention import PricedPlan
from threed.prediction.hardware import Hardware
from threed.prediction.memory import of_config
from threed.prediction.step import predicted_step
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Op
from threed.program.simulate import predict
from threed.spec.kernels import WHOLE, WIDEST, Moved

GB = 1e9


def printed(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


@pytest.mark.parametrize("parameters, dp, expected", [  # ZeRO paper, Table 1: GB, last printed place
    (7.5e9, 64, (120, 31.4, 16.6, 1.88)), (7.5e9, 1024, (120, 30.1, 15.1, 0.12)),
    (128e9, 64, (2048, 536, 284, 32)),
    (1e12, 1024, (16000, 4011, 2013, 15.6))])
def test_paper(parameters, dp, expected):
    """Formulas that leave out the master weights, or do not shard them (the paper has both)."""
    memory = printed("memory", "--parameters", str(parameters), "--dp", str(dp))
    for stage, value in enumerate(expected):
        place = 10.0 ** -len(str(value).partition(".")[2])
        assert abs(memory[f"stage_{stage}"] / GB - value) <= place, stage
        more = memory["fp32_gradients"][f"stage_{stage}"] - memory[f"stage_{stage}"]
        assert more == pytest.approx(2 * parameters / (dp if stage >= 2 else 1))


def test_memory_over_the_mesh():
    """tp and pp divide the parameters, precision the bytes."""
    memory = printed("memory", "--parameters", "8e9", "--dp", "4", "--tp", "2", "--pp", "4",
                     "--dtype", "fp32")
    assert memory["stage_0"] == 1e9 * 16 and memory["stage_3"] == 1e9 * 16 / 4
    assert printed("memory", "--parameters", "1e9", "--master", "none")["stage_0"] == 1e9 * 12


def test_memory_of_a_config():
    """From the plan: the formula except for padding, when all positions are alike."""
    config = load("configs/gpt2-small.yaml", ["parallel.pp=1", "parallel.tp=1", "parallel.dp=8",
                                              "precision.dtype=bf16", "precision.grad_dtype=bf16",
                                              "train.global_batch_size=64",
                                              "parallel.sequence_parallel=false"])
    memory = of_config(config)
    psi = memory["parameters"]
    for stage, formula in enumerate((16 * psi, 4 * psi + 1.5 * psi, 2 * psi + 14 * psi / 8, 2 * psi)):
        assert memory[f"stage_{stage}"] == pytest.approx(formula, rel=1e-3), stage


@pytest.mark.parametrize("arguments", [[], ["configs/toy.yaml", "--parameters", "1e9"],
                                       ["--parameters", "-1"], ["--parameters", "nan"],
                                       ["--parameters", "1e9", "--dtype", "int8"]])
def test_memory_refuses(arguments):
    with pytest.raises(InputError):
        CliRunner().invoke(app, ["memory", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("over", [["offload.optimizer=cpu"],
                                  ["offload.optimizer=nvme", "offload.nvme_path=disk"]])
def test_measured_costs_leave_moves_their_price(over):
    """A run measures how long the hand-over of a move or of a host's step takes, not the move or the step."""
    plan = make_plan(load("configs/toy.yaml", over))
    measured = {(position, op, unit): 1e-6 for position in range(2) for unit in range(20)
                for op in (*COMPUTE, Op.STEP)}
    machines = Hardware(link_gbps=1, host_gbps=1, read_gbps=1, write_gbps=1), Hardware()
    priced = ((PricedPlan(Analysis(plan), analytic_cost(plan, machine, measured), "a run"), machine)
              for machine in machines)
    slow, fast = (predicted_step(plan, machine).step_s for plan, machine in priced)
    assert slow > 2 * fast
    of_device = make_plan(load("configs/toy.yaml"))
    priced = PricedPlan(Analysis(of_device), analytic_cost(of_device, Hardware(), measured), "a run")
    assert predicted_step(priced, Hardware()).step_s == pytest.approx(
        predict(Analysis(of_device), measured).step_s), "what the device computes costs what was measured"


@pytest.mark.parametrize("tp", [1, 2])
def test_graphs_save_launches(tp):
    """Where kernels are shorter than a launch; collectives cut graphs, and CPUs have none."""
    def step_s(hardware: str, graphs: bool, *others: str) -> float:
        config = ["model.layers=12", "model.hidden=768", "model.heads=12", "model.vocab=50304",
                  "model.seq_len=1024", "precision.dtype=bf16", "train.global_batch_size=8",
                  "run.device=auto", "train.micro_batch_size=1", f"parallel.tp={tp}",
                  f"run.cuda_graphs={graphs}", *others]
        plan, machine = make_plan(load(None, config)), Hardware.parse(hardware)
        priced = PricedPlan(Analysis(plan), analytic_cost(plan, machine), "prices")
        return predicted_step(priced, machine).step_s

    short = "model.seq_len=256"
    without, with_graphs = (step_s("h100-sxm", graphs, short) for graphs in (False, True))
    assert with_graphs < 0.85 * without
    slow, slower = (step_s(f"h100-sxm,graph_us={price}e6", True, short) for price in (1, 2))
    launches = 8 * (12 * 2 + 2 + 2)  # of each micro-batch: blocks, embedding and head, forward and backward
    # A block has two sums each way, the embedding one, the head one in backward, and the loss three.
    sums = 8 * (12 * 4 + 2 + 3) if tp == 2 else 0
    assert slower - slow == pytest.approx(launches + sums)
    large = ["model.hidden=2048", "model.heads=16", "model.layers=4", "train.micro_batch_size=8"]
    without, with_graphs = (step_s("h100-sxm", graphs, *large) for graphs in (False, True))
    assert 0.995 * without < with_graphs <= without
    assert len({step_s("cpu-core", graphs, short) for graphs in (False, True)}) == 1


@pytest.mark.parametrize("width", [4096, 12288, 16384, 20480])
def test_wide_norms(width):
    """Pieces move less than separate operations, also where tokens are so wide that a norm's backward reads
    them twice. The widest norms are separate operations."""
    def moved(fused: str) -> list[Moved]:
        plan = make_plan(load(None, [f"model.hidden={width}", "model.heads=32", "model.layers=1",
                                     "model.seq_len=4096", "precision.dtype=bf16", "run.device=auto",
                                     f"model.fused={fused}"]))
        return [kernel for kernel in plan.table.units[1].kernels if isinstance(kernel, Moved)]

    fused, off = moved("auto"), moved("off")
    assert sum(each.forward + each.backward for each in fused) < 0.75 * sum(each.forward + each.backward
                                                                             for each in off)
    (norm,) = (each for each in fused if each.what == "blocks.0.attention_norm")
    assert norm.fused == (width <= WIDEST)
    if norm.fused:
        assert norm.kernels == (1, 4 + (width > WHOLE))


def test_a_devices_memory_has_more_than_the_plan():
    """Temporaries, and what CUDA and NCCL take: for each group of several ranks, and each channel."""
    config = load("configs/toy.yaml", ["parallel.dp=4", "train.global_batch_size=32", "run.device=auto"])
    peak = measure(config, Hardware(context_gb=3.0, communicator_gb=0.5)).peak
    # of dp, tp, world, the tied embedding, and two channels to the other position
    assert peak.taken_bytes == 3.0 * GB + 6 * 0.5 * GB
    assert peak.total > peak.fixed_bytes + peak.activation_bytes + peak.taken_bytes
    config.run.device = "cpu"
    assert measure(config, Hardware()).peak.taken_bytes == 0
    separate = ["parallel.dp=4", "model.fused=off"]
    large, small = (measure(load("configs/gpt2-small.yaml", [*separate, f"model.loss_chunk={chunk}"]),
                            Hardware()).document() for chunk in ("null", "128"))
    saved = large["peak_bytes"] - small["peak_bytes"] - (large["planned_bytes"] - small["planned_bytes"])
    assert saved > 0.5 * GB, "of the 1.6 GB of a micro-batch's logits in fp32"


def test_matrix():
    """Each cell has a verdict, a reason where it is refused, and a test of its name."""
    matrix = printed("matrix")
    assert matrix["works"] + matrix["refused"] == len(matrix["cells"])
    assert len({cell["test"] for cell in matrix["cells"]}) == len(matrix["cells"])
    for cell in matrix["cells"]:
        assert (cell["verdict"] == "refused") == bool(cell["reason"])
    listed = {line.strip() for line in CliRunner().invoke(app, ["matrix", "--refused"]).stdout.splitlines()}
    assert {cell["test"].split("[")[1][:-1] for cell in matrix["cells"] if cell["reason"]} <= listed


def test_the_contract_counts_its_cells():
    """Each entry of the table counts the cells of its own schedule and stage."""
    rows = [line.split() for line in contract.show().splitlines()
            if line.split()[:1] and line.split()[0] in contract.axes()["schedule"]]
    counts = [[int(entry.split("/")[0]) for entry in row[1:]] for row in rows]
    works = [cell for cell in contract.cells() if contract.refusal(cell) is None]
    assert counts == [[sum((cell.schedule, cell.stage) == (row[0], stage) for cell in works)
                       for stage in contract.axes()["stage"]] for row in rows]
    assert sum(map(sum, counts)) == len(works)


def test_configs_are_refused_by_the_contract():
    """A rule of the contract is a refusal of the config, word for word."""
    with pytest.raises(ConfigError) as error:
        load("configs/toy.yaml", ["parallel.dp=4", "train.global_batch_size=32", "zero.stage=0",
                                  "zero.shard_size=2"])
    assert error.value.problems == [contract.RULES[0].problem]


@pytest.mark.parametrize("overrides, said", [
    (["zero.stage=1", "zero.reduce_every=2"], "zero.stage of at least 2"),
    (["zero.stage=2", "zero.residency=1"], "zero.stage of at least 3"),
    (["zero.stage=2", "zero.prefetch=0"], "zero.stage of at least 3"),
    (["zero.stage=0", "zero.persist_below=9"], "zero.stage of at least 3"),
    (["zero.stage=2", "zero.reduce_every=0"], "at least 1, or auto or step"),
    (["zero.stage=2", "zero.reduce_every=stage"], "at least 1, or auto or step"),
    (["zero.stage=3", "zero.residency=all"], "at least 1, or stage or step"),
    (["zero.stage=3", "zero.residency=true"], "residency"),
    (["zero.shard_size=3"], "does not divide parallel.dp=2"),
    (["precision.grad_dtype=bf16"], "must be fp32, or what precision.dtype is (fp32)"),
    (["precision.dtype=bf16", "precision.reduce_dtype=fp16"],
     "must be fp32, or what precision.dtype is (bf16)"),
    (["precision.master=none"], "fp32 weights have no other copy"),
    (["precision.loss_scale=big"], "dynamic or a number above 0"),
    (["precision.loss_scale=0"], "dynamic or a number above 0"),
    (["precision.loss_scale=.nan"], "dynamic or a number above 0"),
    (["precision.hysteresis=0"], "at least 1"),
    (["precision.dtype=fp16", "precision.min_loss_scale=131072"], "is above precision.initial_loss_scale"),
    (["precision.hysteresis=3"], "is for a dynamic loss scale"),
    (["precision.dtype=fp16", "precision.loss_scale=64", "precision.initial_loss_scale=32"],
     "is for a dynamic loss scale"),
    (["zero_optimization.stage3_param_persistence_threshold=5"], "use zero.persist_below"),
    (["gradient_accumulation_steps=5"], "use train.global_batch_size"),
    (["bf16.enabled=true"], "use precision.dtype=bf16"),
])
def test_refusals(overrides, said):
    """A setting that would have no effect, a value that means nothing, a name of another framework."""
    with pytest.raises(ConfigError) as error:
        load("configs/toy.yaml", ["parallel.dp=2", *overrides])
    assert said in str(error.value) and len(error.value.problems) == 1


def test_imbalance():
    """With half of a step in experts, twice the rows take longer, and at most twice as long."""
    moe = load(None, ["model.family=moe", "parallel.dp=4", "parallel.ep=4", "train.global_batch_size=8"])
    even, uneven = (threed.predict(moe, "h100-sxm", imbalance=times)["step_time"] for times in (1, 2))
    assert even < uneven < 2 * even
    alone = load(None, ["model.family=moe", "parallel.dp=4", "train.global_batch_size=8"])
    for config, times, costs, message in (
            (moe, 0.5, None, "at least 1"), (moe, 5, None, "at most 4 times the rows"),
            (load(None, []), 2, None, "no experts"), (alone, 2, None, "parallel.ep is 1"),
            (moe, 2, "runs/of-it", "measured costs")):
        with pytest.raises(InputError, match=message):
            threed.predict(config, "", costs, imbalance=times)

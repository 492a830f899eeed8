"""Prices of kernels and collectives, and the files that describe machines."""

from __future__ import annotations

from dataclasses import replace

import pytest

import threed
from tests.harness import tiny
from threed.base.errors import InputError
from threed.base.mesh import Mesh
from threed.planner import make_pipeline, make_plan
from threed.prediction import analytic
from threed.prediction.contention import step, timed
from threed.prediction.hardware import GroupPlace, Hardware, load, names, places
from threed.prediction.prices import Prices, Travel
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.walk import seconds_of
from threed.spec.kernels import AttentionKernel, Moved, Product

A100, CPU = load("a100-sxm"), load("cpu-core")


@pytest.mark.parametrize("name", names())
def test_files(name):
    hardware = load(name)
    assert hardware.name != name and hardware.memory_gb > 1
    assert Hardware.parse(f"{name},devices=4").devices == 4


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("tflops: 100\ndevices: 4\n")
    hardware = Hardware.parse(f"{path},adapters=2")
    assert (hardware.name, hardware.tflops, hardware.devices, hardware.adapters) == ("mine", 100, 4, 2)


@pytest.mark.parametrize("text, message", [
    ("h100", "there is no such file.*a100-sxm"), ("foo=1", "'foo' is not one of name, tflops"),
    ("tflops=fast", "'tflops=fast' must be a name with a number"), ("tflops=0", "tflops=0.0 must be above 0"),
    ("tflops=nan", "must be above 0"), ("efficiency=1.5", "is a share, at most 1"),
    ("devices=2.5", "devices=2.5 must be a whole number"), ("a100-sxm,tp_gbps=1", "'tp_gbps' is not one of"),
    ("a100-sxm,fast", "'fast' must be a name with a number")])
def test_bad_hardware(text, message):
    with pytest.raises(InputError, match=message):
        Hardware.parse(text)


@pytest.mark.parametrize("text, message", [
    ("- 1\n", "a name and a number on each line"), ("tflops: [1]\n", "tflops=.1. must be a number"),
    ("tflops: true\n", "must be a number"), ("speed: 1\n", "'speed' is not one of"),
    ("a: b: c\n", "cannot be read")])
def test_bad_files(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load(str(path))


def test_products():
    prices = Prices(A100, 2)
    best = 312e12 * A100.efficiency
    for m, n, k in ((8192, 8192, 8192), (1000, 1000, 64), (128, 128, 128), (1, 50000, 4096)):
        seconds = prices.product(m, n, k)
        assert seconds > 2 * m * n * k / best
        for other in ((m + 100, n, k), (m, n + 100, k), (m, n, k + 100)):
            assert prices.product(*other) >= seconds
    assert prices.product(8192, 8192, 8192) < 1.1 * 2 * 8192**3 / best
    # 109 tiles are two waves on 108 units, and 4096 rows of one number read a whole matrix.
    assert prices.product(108 * 256, 128, 8192) < 0.6 * prices.product(109 * 256 * 2, 128, 8192)
    assert prices.product(1, 4096, 4096) > 2 * 4096**2 / (A100.memory_gbps / 8 * 1e9)
    assert Prices(A100, 4).product(4096, 4096, 4096) > 10 * prices.product(4096, 4096, 4096)
    assert prices.product(0, 8, 8) == 0


def test_kernels():
    prices = Prices(A100, 2)
    product, core = Product(8192, 4096, 4096), AttentionKernel(4, 32, 8, 2048, 128)
    assert prices.input_half([product]) == pytest.approx(prices.forward([product]), 0.2)
    assert prices.weight_half([product]) == pytest.approx(prices.forward([product]), 0.2)
    # A softmax takes as long for each pair of tokens, whatever the size of a head.
    slow = Prices(replace(A100, exponential_ns=1e-3), 2)
    wide, narrow = AttentionKernel(1, 8, 8, 2048, 128), AttentionKernel(1, 64, 64, 2048, 16)
    assert prices.forward([wide]) == prices.forward([narrow])
    for core, heads in ((wide, 8), (narrow, 64)):
        for phase in (Prices.forward, Prices.input_half):
            assert phase(slow, [core]) - phase(prices, [core]) == pytest.approx(heads * 2048**2 * 1e-12)
    # What is bound by memory takes the longer of its bytes and its exponentials.
    gelu = Moved("gelu", 10**6, 10**6, exponentials=(10**9, 10))
    assert slow.forward([gelu]) == pytest.approx(1e-3 + A100.kernel_us * 1e-6)
    assert slow.input_half([gelu]) == prices.input_half([gelu])
    square = Product(2048, 2048, 128, 32, weight=False)  # both gradients are of the input half
    assert prices.input_half([square]) > 1.7 * prices.forward([square]) and not prices.weight_half([square])
    assert 2 < prices.input_half([core]) / prices.forward([core]) < 3
    assert prices.weight_half([core, Moved("sum", 1, 1)]) == 0
    assert prices.forward([Moved("sum", 10**9, 0)]) > 10**9 / 2.04e12
    # A host that launches many small kernels is what a step waits for.
    small = [Moved("sum", 1000, 1000)] * 100
    assert prices.forward(small) == pytest.approx(100 * A100.launch_us * 1e-6)
    # Of a CUDA graph it launches one; then the device's own time is left.
    assert prices.forward(small, 1) == pytest.approx(sum(prices.forward([each], 0) for each in small))
    assert prices.forward(small, 1) < 0.6 * prices.forward(small)
    assert prices.forward(small, 100) == pytest.approx(100 * A100.graph_us * 1e-6)
    cpu = load("cpu-core")
    assert Prices(cpu, 4).forward(small) > 100 * cpu.launch_us * 1e-6
    stores = Hardware.parse("a100-sxm,attention_passes=6")
    assert Prices(stores, 2).forward([core]) > 2 * prices.forward([core])


def test_places():
    mesh = Mesh(tp=4, dp=4, pp=2)
    found = places(mesh, 8)
    assert {name: (place.ranks, place.nodes, place.together) for name, place in found.items()
            if name in ("tp", "dp", "pp", "world")} == {
        "tp": (4, 1, 4), "dp": (4, 2, 2), "pp": (2, 2, 1), "world": (32, 4, 8)}


def test_collectives():
    travel, size = Travel(A100), 10**9
    node, two, apart = (GroupPlace(ranks, 8) for ranks in (range(8), range(16), range(0, 64, 8)))
    inside, outside = A100.node_gbps / 8e-9 * A100.node_efficiency, 100e9 * A100.adapter_efficiency
    assert travel.ring(size, node) == pytest.approx(size / inside, 0.01)
    assert travel.ring(size, two) == pytest.approx(size / outside, 0.01)
    assert travel.ring(size, apart) == pytest.approx(8 * size / outside, 0.01)  # 8 groups share the adapters
    # Over two nodes a ring sends 15/8 of a message over the adapters, and a tree of rings all of it once.
    assert travel.all_reduce(size, two) == pytest.approx(size * 8 / 15 / outside, 0.01)
    assert travel.all_reduce(1000, node) < travel.ring(1000, node, 2)  # small: a tree
    assert travel.ring(size, GroupPlace([3], 8)) == travel.ring(0, node) == 0
    assert travel.message(size, False) < travel.message(size, True) == pytest.approx(8 * size / outside, 0.01)


def test_all_to_alls():
    """Over two nodes, 8 of the 15 parts that a rank sends leave its node, whose 8 ranks share the adapters.
    Large all-to-alls have an efficiency of their own, which changes nothing else."""
    size, node, two = 10**9, GroupPlace(range(8), 8), GroupPlace(range(16), 8)
    inside, outside = A100.node_gbps / 8e-9 * A100.node_efficiency, 100e9 * A100.adapter_efficiency
    travel, slow = Travel(A100), Travel(replace(A100, exchange_efficiency=0.5))
    assert travel.all_to_all(size, node) == pytest.approx(size / inside, 0.01)
    assert travel.all_to_all(size, two) == pytest.approx(8 * size * 8 / 15 / outside, 0.01)
    for place in (node, two):
        assert slow.all_to_all(size, place) == pytest.approx(2 * travel.all_to_all(size, place), 0.01)
        assert slow.all_to_all(1, place) == pytest.approx(travel.all_to_all(1, place), 0.01)
        assert slow.ring(size, place) == travel.ring(size, place)
        assert slow.all_reduce(size, place) == travel.all_reduce(size, place)


def plan_of(*overrides):
    config = tiny("run.device=cpu", *overrides)
    return make_plan(config, make_pipeline(config))


def test_recomputed_pieces_cost():
    policies = {policy: plan_of(f"activation.policy={policy}") for policy in ("none", "selective", "full")}
    seconds = {policy: step(Analysis(plan), analytic.cost(plan, A100), None).total_s
               for policy, plan in policies.items()}
    assert seconds["none"] < seconds["selective"] < seconds["full"]


def test_fused_pieces_are_cheaper():
    sizes = "model.hidden=512", "model.seq_len=512", "model.family=llama"
    plans = [plan_of(*sizes, f"model.fused={fused}") for fused in ("on", "off")]
    on, off = (step(Analysis(plan), analytic.cost(plan, CPU), None).total_s for plan in plans)
    assert on < off


def test_contention():
    plan = plan_of("parallel.dp=4", "train.global_batch_size=8", "zero.stage=2", "model.hidden=256",
                   "model.seq_len=256")
    price = analytic.cost(plan, CPU)
    seconds = seconds_of(Analysis(plan).simulated("train"), price)
    total = [timed(Analysis(plan), seconds, replace(CPU, contention=share)).total_s
             for share in (0.0, 0.5, 1.0)]
    assert total[0] < total[1] < total[2]
    program = plan.programs["train"][0]
    computed = sum(price(0, item) for item in program if item.op in COMPUTE or item.op == Op.STEP)
    sent = sum(price(0, item) for item in program if item.op in (Op.GATHER, Op.REDUCE))
    assert total[2] > 0.9 * (computed + sent)


def test_a_processor_copies_messages():
    """Where the processor that computes also copies messages, computation beside them takes longer; on a GPU
    it does not."""
    plan = plan_of("parallel.pp=2", "train.global_batch_size=8")
    seconds = seconds_of(Analysis(plan).simulated("train"), analytic.cost(plan, CPU))
    program = plan.programs["train"][0]

    def longer(waits: bool) -> list[float]:
        when = timed(Analysis(plan), seconds, replace(CPU, contention=1.0, waits=waits))
        return [end - start - takes for start, end, takes in
                zip(when.start[0], when.end[0], seconds[0], strict=True)]

    sent_s = sum(takes for takes, item in zip(seconds[0], program, strict=True) if item.op == Op.SEND)
    assert 0 < sum(longer(True)) - sum(longer(False)) <= sent_s


@pytest.mark.parametrize("cut, hops", [  # of a block over tp=2
    ("false", {Op.FORWARD: 4, Op.BACKWARD_INPUT: 4, Op.BACKWARD_WEIGHT: 0}),  # two all-reduces
    ("true", {Op.FORWARD: 4, Op.BACKWARD_INPUT: 4, Op.BACKWARD_WEIGHT: 2})])  # two gathers, two scatters
def test_collectives_of_tensor_parallelism(cut, hops):
    plan = plan_of("parallel.tp=2", f"parallel.sequence_parallel={cut}")
    near, far = (analytic.cost(plan, replace(A100, node_us=each)) for each in (1.0, 1001.0))
    for op, count in hops.items():
        item = Instruction(op, 1, 0)
        assert far(0, item) - near(0, item) == pytest.approx(1e-3 * count), op
    # A CPU computes nothing beside them.
    item = Instruction(Op.BACKWARD, 1, 0)
    alone, shared = (analytic.cost(plan, replace(load("cpu-core"), contention=each)) for each in (0.0, 1.0))
    assert shared(0, item) > alone(0, item)


def test_across_nodes_is_slower():
    """tp over two nodes is not priced as NVLink."""
    config = ("model.hidden=512", "model.heads=16", "model.vocab_multiple=128")
    inside, across = (step(Analysis(plan), analytic.cost(plan, A100), None).total_s for plan in (
        plan_of(*config, "parallel.tp=8"), plan_of(*config, "parallel.tp=16")))
    assert across > inside


def test_clip_reads_gradients():
    """CLIP takes the time of reading this rank's part of the gradients, and none before an evaluation."""
    plans = [plan_of("parallel.dp=4", f"zero.stage={stage}", "train.global_batch_size=8") for stage in (0, 2)]
    hardware = replace(A100, kernel_us=0.0, node_us=0.0)
    whole, part = (analytic.cost(plan, hardware)(0, Instruction(Op.CLIP)) for plan in plans)
    without = analytic.cost(plans[0], hardware)(0, Instruction(Op.CLIP, gradients="none"))
    assert without < 1e-8 and whole - without == pytest.approx(4 * (part - without), rel=0.01)
    table = plans[0].table
    size = sum(table.parameters[unit].numel for unit in table.stepped(0)) * table.elements.grad
    speed = hardware.memory_gbps * hardware.memory_efficiency * 1e9 / 8
    assert whole == pytest.approx(size / speed, rel=0.01)


def test_a_whole_training():
    config = threed.load("configs/llama3-8b.yaml", ["parallel.dp=8"])
    values = threed.predict(config, "h100-sxm,dollars=2", tokens=1e12)
    whole = values["training"]
    assert whole["days"] == pytest.approx(1e12 / values["tokens_per_s"] / 86400)
    assert whole["device_hours"] == pytest.approx(whole["days"] * 24 * values["devices"])
    assert whole["dollars"] == pytest.approx(2 * whole["device_hours"])
    assert 0.2 < values["mfu"] < 0.7 and "H100" in values["hardware"]


def test_fused_pieces_are_what_runs():
    """On a GPU they are the default; a CPU computes separate operations, in its plan and at its prices."""
    sizes = ["model.family=llama", "model.dropout=0.1", "model.kv_heads=2"]
    assert threed.load(None, sizes).model.fused == "auto"
    on_cpu = [threed.load(None, [*sizes, "run.device=cpu", *others]) for others in ([], ["model.fused=off"])]
    assert on_cpu[0] == on_cpu[1] and not on_cpu[0].model.fuses

    def step_s(fused: str, hardware: str) -> float:
        return threed.predict(threed.load(None, [*sizes, f"model.fused={fused}"]), hardware)["step_time"]

    assert step_s("auto", "cpu-core") == step_s("off", "cpu-core")
    assert step_s("auto", "h100-sxm") == step_s("on", "h100-sxm") < step_s("off", "h100-sxm")

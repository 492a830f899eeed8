"""What is measured of the balance of experts, and memory that rows need beyond what is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness import batches, tiny
from tests.loopback.test_experts import BF16, BIAS, MESHES, PP, moe
from tests.loopback.test_saved import watch
from tests.reference import Picks
from threed.base.errors import RunError
from threed.comm.group import Comm
from threed.comm.lanes import Lane
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.travel.arrivals import Arrivals, room_for
from threed.models.layers.experts import Routes
from threed.monitor.meter import Meter
from threed.monitor.spread import Spread
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.summary import stages
from threed.schema import Config
from threed.tensor import experts

Metrics = dict[str, float | None]
STEPS, VERIFY = 2, "run.verify_every=1"


def metrics_of(config: Config) -> tuple[list[Metrics], list[list[str]]]:
    """Of each step: the metrics of experts, and the warnings. (`config` has run.verify_every.)"""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> tuple[list[Metrics], list[list[str]]]:
        engine = Engine(Analysis(plan), comm)
        meter, metrics, warnings = Meter(config, Analysis(plan), comm, engine.arrivals), [], []
        for step in range(STEPS):
            engine.rehearse(batches(config, comm, step))  # what it exchanges does not count
            meter.begin()
            _, trace = engine.train_step(batches(config, comm, step))
            report = meter.report(trace, trace.total_s)
            values = meter.metrics(report, 1.0)
            metrics.append({name: value for name, value in values.items() if name.startswith("moe/")})
            warnings.append(meter.spread.warnings)
        return metrics, warnings

    metrics, warnings = run_loopback(plan, make_mesh(config), work)[0]
    return metrics, warnings


def expected(config: Config, picks: Picks, step: int) -> tuple[float, float]:
    """The most rows of a rank, and of an expert, in an exchange of a step, over the mean."""
    train, model, ep = config.train, config.model, config.parallel.ep
    at_once = train.micro_batch_size * ep  # sequences of an exchange
    rows = experts = 0.0
    for first in range(step * train.global_batch_size, (step + 1) * train.global_batch_size, at_once):
        for block in {block for block, _ in picks}:
            chosen = torch.tensor([picks[block, sample] for sample in range(first, first + at_once)])
            loads = torch.bincount(chosen.flatten(), minlength=model.experts).double()
            experts = max(experts, float(loads.max() / loads.mean()))
            loads = loads.view(ep, -1).sum(1)
            rows = max(rows, float(loads.max() / loads.mean()))
    return rows, experts


@pytest.mark.parametrize("name", ["alone", "ep", "ep-edp"])
def test_imbalance_is_that_of_the_choices(name, references):
    config = moe(*MESHES[name], *PP, "activation.policy=full", VERIFY)
    picks = references(config, STEPS).picks
    for step, values in enumerate(metrics_of(config)[0]):
        rows, experts = expected(config, picks, step)
        assert values == {"moe/imbalance": pytest.approx(rows), "moe/load_max": pytest.approx(experts),
                          "moe/room": 0, "moe/dropped": 0}
        assert experts > 1 and (rows > 1) == (name != "alone")


def test_balanced():
    one = {"moe/imbalance": 1, "moe/load_max": 1, "moe/room": 0, "moe/dropped": 0}
    config = moe(*MESHES["ep"], "model.moe_route=balanced", "model.moe_room=1", VERIFY)
    assert metrics_of(config)[0] == [one] * STEPS


def test_more_rows_than_room():
    """Counted in each step; said once, with what to set."""
    metrics, warnings = metrics_of(moe(*MESHES["ep"], "model.moe_room=1", VERIFY))
    assert all(values["moe/room"] for values in metrics)
    (text,), *later = warnings
    assert room_for(metrics[0]["moe/imbalance"] or 0) in text and not any(later)


@pytest.mark.parametrize("room", [1, 4])
def test_memory_ends(room, monkeypatch):
    """The error names unit, micro-batch, rows and the room, if more rows came than that."""
    config = moe(*MESHES["ep"], f"model.moe_room={room}")
    plan, balanced = make_plan(config), config.train.micro_batch_size * config.model.seq_len * 2

    def ends(packed, *args):
        if len(packed) > balanced or room == 4:
            raise torch.OutOfMemoryError("out of memory")
        return compute(packed, *args)

    compute = experts.compute
    monkeypatch.setattr(experts, "compute", ends)

    def work(comm: Comm) -> None:
        Engine(Analysis(plan), comm).train_step(batches(config, comm, 0))

    with pytest.raises(RunError, match="out of memory") as caught:
        run_loopback(plan, make_mesh(config), work)
    told = ["rows of 'arrived' came from blocks." in str(caught.value),
            "plan with model.moe_room=" in str(caught.value)]
    assert told == [room == 1] * 2


@pytest.mark.parametrize("route, least", [("learned", 0.5), ("balanced", 0.9)])
@pytest.mark.parametrize("more", [[], ["activation.policy=full", "model.shared_expert_ffn=64"],
                                  ["parallel.schedule=zb-h1"], ["parallel.pair=true"],
                                  ["parallel.schedule=zb-v", "parallel.pair=true", "activation.policy=full"]],
                         ids=["none", "full-shared", "zb-h1", "pair", "pair-zb-v-full"])
def test_memory_of_the_rows_that_come(more, route, least, monkeypatch):
    """A plan with room for them: its peak of activations holds on every rank. Balanced, it is not much more;
    else it counts each exchange as the most uneven one."""
    most, add, lane = [], Arrivals.add, Comm._make_lane

    def adding(self, *args):
        add(self, *args)
        most.append(self.imbalance)

    monkeypatch.setattr(Arrivals, "add", adding)
    # A thread sees what it allocates itself: exchanges run on that of the computation here.
    monkeypatch.setattr(Comm, "_make_lane", lambda self, name, beside: Lane(self.device) if name == "ep"
                        else lane(self, name, beside))
    config = moe(*MESHES["ep"], *PP, "model.hidden=128", "model.expert_ffn_hidden=128", "model.seq_len=64",
                 "model.layers=4", "train.global_batch_size=16", "model.tie_embeddings=false",
                 f"model.moe_route={route}", *more)
    seen = watch(config, make_plan(config))
    model = replace(config.model, moe_room=max(most))
    plan = make_plan(replace(config, model=model))
    for rank, each in enumerate(seen):
        position = make_mesh(config).coordinate(rank).position
        peak = stages(Analysis(plan))[position].activation_peak_bytes
        measured = max(*each.before, *each.after)
        # `sent`: of what it sends, a rank of a loopback has a copy.
        sent = next(made.bytes for unit in plan.table.units for made in unit.makes if made.name == "routed")
        assert least * peak < measured <= peak + sent, (rank, measured / peak)


@pytest.mark.parametrize("more", [
    [], ["zero.stage=1"], ["zero.stage=2", "precision.master=none"], ["zero.stage=3"],
    ["zero.stage=3", "zero.persist_below=1000"], ["zero.stage=3", "model.lora_rank=2"],
    *(["zero.stage=3", f"offload.optimizer={away}", f"offload.parameters={away}", f"offload.nvme_path={path}"]
      for away, path in (("cpu", "null"), ("nvme", "/tmp")))], ids=lambda more: "-".join(more) or "zero-0")
def test_biases_have_32_bits(more, monkeypatch):
    """Near 1, bf16 could not hold a step of 0.001. Routers read each as it is, from wherever it comes; their
    weights are 16 bits."""
    config = moe(*MESHES["ep-edp"], *BIAS, *BF16, "optimizer.balance_rate=0.001", *more)
    plan, choice = make_plan(config), Routes._choice
    read: dict[tuple[str, int], list[torch.Tensor]] = {}

    def choosing(self, *args):
        bias, weight = self.router.compute.bias, self.router.compute.weight
        assert (bias.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
        read.setdefault((self.name, self.context.groups["world"].rank()), []).append(bias.detach().clone())
        return choice(self, *args)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        for state in engine.states.values():
            if state.part.unit.kind == "counted":
                state.optimizer_state.master[:state.part.unpadded].fill_(1.0)
                state.optimizer_state.publish()
        for step in range(3):
            engine.train_step(batches(config, comm, step))

    monkeypatch.setattr(Routes, "_choice", choosing)
    run_loopback(plan, make_mesh(config), work)
    assert len(read) == config.model.layers * 4
    for seen in read.values():
        before, after, last = (seen[at * config.num_microbatches] for at in range(3))
        assert (before == 1).all() and len(seen) == 3 * config.num_microbatches
        for then, now in ((before, after), (after, last)):
            moved = (now - then).sign() * (not config.model.lora_rank)  # LoRA freezes them
            assert torch.equal(now, then + moved * 0.001) and (moved.any() or config.model.lora_rank)


def test_no_experts_no_metrics():
    assert metrics_of(tiny("model.layers=2", "model.hidden=16", VERIFY))[0] == [{}] * STEPS


@pytest.mark.core
def test_a_capacity_that_drops_many_is_said_once():
    """Above a tenth of the choices of a step, over all ranks; what exceeds memory is another line."""
    def look(spread: Spread, dropped: list[float], beyond: float = 0.0) -> list[str]:
        ranks = torch.ones(2)
        spread.look(ranks, ranks, beyond * ranks, 100 * ranks, torch.tensor(dropped))
        return spread.warnings

    spread = Spread()
    assert not look(spread, [0.0, 19.0])
    (line,) = look(spread, [98.0, 78.0], beyond=1.0)[1:]
    assert line.startswith("warning: model.moe_capacity drops 88% of the choices of this step")
    assert not look(spread, [98.0, 78.0], beyond=1.0), "each once"
    assert not Spread().look(torch.zeros(2), *[torch.zeros(2)] * 4), "no experts: no numbers"

"""Where the time of a step goes, on traces whose answer is known: those of the predicting walk."""

from __future__ import annotations

import pytest

from threed.base.errors import InputError
from threed.comm.group import COPY_LANES, HOST_LANES
from threed.config.load import load
from threed.monitor.attribute import BESIDE, CAUSES, attribute, beside, parts
from threed.monitor.compare import _as_trace
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.costs import device_of, load_costs, read_costs, save_costs
from threed.program.instruction import Instruction, Op
from threed.program.simulate import predict
from threed.program.trace import Ran, Trace, Wait

F, B = 1.0, 1.0  # seconds of a stage


def walked(pp: int, microbatches: int, *overrides: str):
    """(attribution of each position, step_s) of a plan whose every stage takes F and B, and CLIP and STEP
    nothing."""
    config = load(None, ["model.layers=6", f"parallel.pp={pp}", f"train.global_batch_size={microbatches}",
                         *overrides])
    plan = make_plan(config)
    table = plan.table
    costs = {(p, op, unit): seconds / len(table.units_of(p)) for p in range(pp) for unit in table.units_of(p)
             for op, seconds in ((Op.FORWARD, F), (Op.BACKWARD, B))}
    costs |= {(p, Op.STEP, unit): 0.0 for p in range(pp) for unit in table.held(p)}
    analysis = Analysis(plan)
    prediction = predict(analysis, costs)
    attributions = []
    for position, program in enumerate(plan.programs["train"]):
        trace = _as_trace(analysis, prediction.walk, position)
        attributions.append(attribute(parts(trace, program), 0.0, prediction.step_s))
    return attributions, prediction.step_s


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 4), (2, 4), (4, 4), (4, 8)])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_bubble_of_1f1b(pp, microbatches, tied):
    """(p-1)/(m+p-1) of the step, all of it waiting: for messages (a tied embedding's other half included), or
    for CLIP."""
    attributions, step_s = walked(pp, microbatches, f"model.tie_embeddings={tied}")
    for position, causes in enumerate(attributions):
        assert tuple(causes) == CAUSES
        assert sum(causes.values()) == pytest.approx(step_s)
        assert causes["compute"] == pytest.approx(microbatches * (F + B))
        assert 1 - causes["compute"] / step_s == pytest.approx((pp - 1) / (microbatches + pp - 1))
        assert causes["dp_wait"] == causes["optimizer"] == 0
        drain = position * B  # this long a position has ended its last backward before position 0 has
        assert causes["idle"] == pytest.approx(0 if tied == "true" and position == pp - 1 else drain)


def test_each_moment_counts_once():
    """A trace by hand: every kind of instruction, every kind of wait."""
    program = [Instruction(Op.GATHER, 0, group="dp"), Instruction(Op.RECV, 0, 0, "act", peer=0),
               Instruction(Op.FORWARD, 1, 0),
               Instruction(Op.REDUCE, 1, group="dp"), Instruction(Op.REDUCE, 2, group="tie"),
               Instruction(Op.CLIP),
               Instruction(Op.STEP, 1), Instruction(Op.FETCH, 1, kind="pshard")]
    trace = Trace("train", issued=[0, 1, 3, 12, 14, 16, 30, 33], started=[0, 1, 8, 12, 14, 22, 30, 33],
                  ended=[1, 2, 12, 13, 15, 29, 33, 34],
                  waits=[Wait(2, 0, 2.0), Wait(2, 1, 3.0), Wait(5, 3, 2.0), Wait(5, 4, 4.0)], total_s=35)
    causes = attribute(parts(trace, program), 3.0, 40.0)
    assert causes == {"compute": 4, "p2p_wait": 1 + 3 + 1 + 4 + 1, "dp_wait": 1 + 2 + 1 + 2 + 3,
                     "keys_wait": 0, "owners_wait": 0, "ep_wait": 0, "optimizer": 3, "offload": 1, "idle": 13}


def test_what_lanes_did_beside_the_computation():
    """Of lanes of what is offloaded; what else is waited for does not count, nor does a checkpoint's copy."""
    lanes = ["d2h", "host", "h2d", "dp", "compute"]
    trace = Trace("train", waits=[Wait(4, 0, 1.0), Wait(4, 1, 2.0), Wait(4, 3, 8.0), Wait(4, -1, 16.0)],
                  ran=[Ran(0, 0.0, 3.0), Ran(1, 3.0, 4.0), Ran(2, 7.0, 0.5), Ran(2, 8.0, 0.5)])
    assert beside(trace, lanes) == {"d2h": 3.0, "host": 4.0, "h2d": 1.0, "read": 0.0, "write": 0.0,
                                    "waited": 3.0}
    assert set(BESIDE) == {*COPY_LANES, *HOST_LANES}


def test_costs_file(tmp_path):
    """What is written is read; a run's folder will do."""
    costs = {(0, Op.FORWARD, 0): 0.25, (1, Op.CLIP, -1): 1e-6}
    save_costs(tmp_path / "costs.json", costs, "abc", 3, "NVIDIA H100")
    assert device_of(tmp_path) == "NVIDIA H100"
    assert load_costs(tmp_path) == load_costs(tmp_path / "costs.json") == costs
    assert read_costs(tmp_path)[1:] == ("abc", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("text", [
    None, "", "[]", '{"costs": [', '{"costs": [{"position": 0}]}',
    '{"digest": "a", "steps": "1", "costs": []}',
    '{"digest": "a", "steps": 1, "costs": [{"position": 0, "op": "FLY", "unit": 0, "seconds": 1}]}',
    '{"digest": "a", "steps": 1, "costs": [{"position": 0, "op": "STEP", "unit": 0, "seconds": -1}]}',
    '{"digest": "a", "steps": 1, "costs": [{"position": 0, "op": "STEP", "unit": 0, "seconds": NaN}]}',
    '{"digest": "a", "steps": 1, "costs": [{"position": 0, "op": "STEP", "unit": 0, "seconds": "1"}]}',
    '{"digest": "a", "steps": 1, "costs": [{"position": 0.5, "op": "STEP", "unit": 0, "seconds": 1}]}'])
def test_bad_costs(text, tmp_path):
    if text is not None:
        (tmp_path / "costs.json").write_text(text)
    with pytest.raises(InputError, match=r"costs\.json"):
        load_costs(tmp_path)

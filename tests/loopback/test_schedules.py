"""Every schedule against the single-process reference: a sample of the product; all of it is slow."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.harness import assert_parity, loopback, schedule_config, tiny
from threed.base.errors import InputError
from threed.planner import make_table
from threed.program.costs import save_costs
from threed.program.instruction import Op
from threed.schedules.orders import SCHEDULES, Task, needs

NAMES = [*SCHEDULES, "auto"]
MESHES = [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]  # pp, tp: an order says nothing about tp
PRODUCT = [(name, *mesh, zero, count) for name, mesh, zero, count in itertools.product(
    NAMES, MESHES, (0, 1), ("1", "2", "p", "p+1", "2p", "3p+1"))]
SAMPLE = random.Random(5).sample([case for case in PRODUCT if case[1] < 8], 40)


def check(case: tuple[str, int, int, int, str], references) -> None:
    name, p, tp, zero, count = case
    config = schedule_config(name, p, tp, zero, count)
    if name == "dualpipe-v" and config.num_microbatches < 2 * p:
        # here the refusal is the test
        with pytest.raises(InputError, match=f"dualpipe-v needs {2 * p} micro-batches"):
            loopback(config)
        return
    assert_parity(loopback(config, 3), references(config, 3))


@pytest.mark.slow
@pytest.mark.parametrize("case", PRODUCT, ids=lambda case: "-".join(map(str, case)))
def test_product(case, references):
    """schedule x pp x tp x ZeRO x micro-batches."""
    check(case, references)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case)))
def test_sample(case, references):
    check(case, references)


SPLIT = {
    "sequence-parallel": ["parallel.sequence_parallel=true"],
    "untied": ["model.tie_embeddings=false"],
    "learned-positions": ["model.position=learned", "parallel.sequence_parallel=true"],
    "llama": ["model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=4",
              "parallel.sequence_parallel=true"],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "clipping": ["optimizer.clip_grad=1.0"],
}


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("name", SPLIT)
def test_split_backward(name, schedule, references):
    """BACKWARD_INPUT and BACKWARD_WEIGHT give the fused backward's gradients: norms, biases and embeddings
    included."""
    config = schedule_config(schedule, 2, 2, 1, "2p", "parallel.dp=2", "train.global_batch_size=8",
                             *SPLIT[name])
    assert_parity(loopback(config, 3), references(config, 3))


def test_split_backward_bf16(references):
    config = schedule_config("zb-v", 2, 2, 1, "2p", "precision.dtype=bf16")
    reference, ranks = references(config, 3), loopback(config, 3)
    assert ranks.losses == pytest.approx(reference.losses, rel=1e-3)
    assert ranks.norms == pytest.approx(reference.norms, rel=5e-3)


@pytest.mark.core
def test_same_bits():
    """1F1B and the zero-bubble schedules of the same placement add the same products in the same order."""
    runs = [loopback(schedule_config(name, 4, 1, 1, "2p"), 5) for name in ("1f1b", "zb-h1", "zb-h2")]
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].norms == runs[1].norms == runs[2].norms


@pytest.mark.core
def test_file(tmp_path, references):
    """An order written by a user: CSV and YAML, checked like any other, and refused with the place of what is
    wrong."""
    rows = [["F0.0", "F0.1", "I0.0", "W0.0", "B0.1"], ["F1.0", "B1.0", "F1.1", "I1.1", "W1.1"]]
    (tmp_path / "order.csv").write_text("\n".join(",".join(row) for row in rows))
    (tmp_path / "order.yaml").write_text("\n".join(f"- [{', '.join(row)}]" for row in rows))
    for suffix in ("csv", "yaml"):
        config = schedule_config(f"file:{tmp_path / 'order'}.{suffix}", 2, 1, 1, "2")
        assert_parity(loopback(config, 3), references(config, 3))
    for change, words in ((("B0.1", "B0.7"), "backward of micro-batch 7 on stage 0 .*no such micro-batch"),
                          (("W0.0", "X0.0"), "'X0.0' is not a task"),
                          (("F0.1", "F1.0"), "stage 1 is already on row 1|stage 1")):
        broken = [[change[1] if cell == change[0] else cell for cell in row] for row in rows]
        (tmp_path / "broken.csv").write_text("\n".join(",".join(row) for row in broken))
        with pytest.raises(Exception, match=words):
            loopback(schedule_config(f"file:{tmp_path / 'broken'}.csv", 2, 1, 1, "2"))


def random_order(p: int, m: int, v: int, rng: random.Random) -> list[list[str]]:
    """Any order that can run: tasks that are ready, at random, each backward whole or in halves."""
    place = [stage % p for stage in range(p * v)]
    rng.shuffle(place)
    waiting = [Task(kind, stage, k) for stage in range(p * v) for k in range(m)
               for kind in (("F", "B") if rng.random() < 0.5 else ("F", "I", "W"))]
    done: set[Task] = set()
    rows: list[list[str]] = [[] for _ in range(p)]
    while waiting:
        task = rng.choice([t for t in waiting if all(need in done for need in needs(t, p * v - 1))])
        waiting.remove(task)
        done.add(task._replace(kind="I") if task.kind == "B" else task)
        rows[place[task.stage]].append(f"{task.kind}{task.stage}.{task.microbatch}")
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_random_files(seed, tmp_path, references):
    """Any order that can run, stages anywhere, trains as the reference does."""
    rng = random.Random(seed)
    p, m, v = rng.choice(((2, 3, 1), (2, 2, 2), (3, 4, 1), (2, 4, 3), (4, 3, 1)))
    path = tmp_path / "order.csv"
    path.write_text("\n".join(",".join(row) for row in random_order(p, m, v, rng)))
    config = schedule_config(f"file:{path}", p, 1, rng.choice((0, 1)), str(m), "model.layers=6",
                             "model.tie_embeddings=false")
    assert_parity(loopback(config, 3), references(config, 3))


@pytest.mark.core
def test_tied_embeddings_in_a_file(tmp_path):
    """The two ends of a tied embedding meet in a group of the first and the last position: elsewhere it is
    refused."""
    (tmp_path / "order.csv").write_text("F1.0,B1.0\nF0.0,B0.0\n")
    with pytest.raises(InputError, match="embedding on position 1 and the head on 0; tied embeddings need"):
        loopback(schedule_config(f"file:{tmp_path / 'order.csv'}", 2, 1, 1, "1"))


@pytest.mark.core
def test_measured_costs(tmp_path):
    """Stages are balanced by a run's measured costs where it is given: here the first blocks are slow."""
    costs = {(0, op, unit): 10.0 if unit < 3 else 1.0 for unit in range(8)
             for op in (Op.FORWARD, Op.BACKWARD)}
    save_costs(tmp_path / "costs.json", costs, "any", 1)
    by_flops, measured = (make_table(tiny("parallel.pp=2", *others), (0, 1))
                          for others in ((), (f"parallel.costs={tmp_path}",)))
    assert [table.units_of(0) for table in (by_flops, measured)] == [[0, 1, 2, 3], [0, 1]]

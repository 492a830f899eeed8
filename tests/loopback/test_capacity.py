"""model.moe_capacity: an expert takes no more than so many tokens of a sequence, on every mesh the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests import harness, reference
from tests.harness import assert_contract, batches, loopback
from tests.loopback.test_balance import STEPS, VERIFY, metrics_of
from tests.loopback.test_experts import BIAS, FULL, MESHES, PP, SHARED, SP, megatron, moe
from threed.base.errors import ConfigError
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.names import EVALUATE
from threed.program.traffic import sent_by
from threed.schema import Config
from threed.tensor import experts

CASES = {
    "alone": [], "bias": [*MESHES["ep"], *BIAS], "full": [*MESHES["ep"], *FULL, "zero.stage=3"],
    "sequence-parallel": [*MESHES["folded"], *SHARED, *FULL],
    "penalty": [*SP, "model.balance=sequence", "model.balance_weight=0.1", "model.z_loss=0.01"],
    "zb-v": [*MESHES["ep"], *PP, "parallel.schedule=zb-v", "train.micro_batch_size=2"],
    "evaluate-verify": [*MESHES["ep"], "train.eval_every=1", "run.verify_every=1"],
    "as-it-is": [*MESHES["ep"], "model.normalize_top_k=false", "model.router_score=sigmoid"],
}


@pytest.mark.parametrize("name", CASES)
def test_contract(name, references):
    assert_contract(moe("model.moe_capacity=0.75", "train.seed=6", *CASES[name]), references)


@pytest.mark.parametrize("mesh", ["alone", "folded"])
def test_one_that_none_exceeds_changes_nothing(mesh):
    limited, free = (loopback(moe(*MESHES[mesh], *more), steps=2)
                     for more in (["model.moe_capacity=4"], []))
    assert limited.losses == free.losses
    for key, values in free.weights.items():
        assert torch.equal(limited.weights[key], values), key


def test_what_is_dropped():
    """The lightest, and of equal ones the later."""
    picks = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1]]).unsqueeze(1)
    weights = torch.tensor([[0.5, 0.1], [0.7, 0.3], [0.5, 0.4], [0.6, 0.1]]).unsqueeze(1)
    within = experts.within(picks, weights, 3, 2)
    assert within.squeeze(1).tolist() == [[3, 1], [0, 2], [3, 1], [0, 4]]
    both = experts.within(torch.cat([picks, picks], 1), torch.cat([weights, weights], 1), 3, 2)
    assert torch.equal(both, torch.cat([within, within], 1))  # each sequence by itself


def test_rounding_chooses_nothing():
    """Equal tokens have weights that differ by rounding, on each mesh in another way."""
    generator = torch.Generator().manual_seed(2)
    picks = torch.randint(4, (64, 3, 1), generator=generator)
    weights = torch.rand((1, 3, 1), generator=generator).repeat(64, 1, 1)
    weights[::5] = torch.rand((13, 3, 1), generator=generator)
    noise = 1 + 1e-6 * torch.randn((20, *weights.shape), generator=generator)
    within = [experts.within(picks, weights * each, 4, 9) for each in noise]
    assert all(torch.equal(each, within[0]) for each in within)
    equal = torch.ones(64, dtype=torch.bool)
    equal[::5] = False
    for expert in range(4):
        for sequence in range(3):  # of equal tokens the first ones stay
            mine = within[0][equal, sequence, 0]
            mine = mine[mine % 4 == expert]
            assert mine.tolist() == sorted(mine.tolist())


@pytest.mark.parametrize("mesh", ["ep", "folded", "in-tp"])
def test_text_of_one_token(mesh, monkeypatch):
    """Of which 90% are one token: every mesh drops the same choices."""
    def repeated(config: Config, step: int) -> reference.Data:
        data = data_of(config, step)
        same = torch.rand(data.tokens_GS.shape, generator=torch.Generator().manual_seed(step)) < 0.9
        return replace(data, tokens_GS=data.tokens_GS.masked_fill(same, 3))

    data_of = reference.data_of
    for module in (reference, harness):
        monkeypatch.setattr(module, "data_of", repeated)
    assert_contract(moe(*MESHES[mesh], "model.seq_len=32", "model.moe_capacity=0.5"), reference.run)


def test_drops_are_megatrons():
    """Of one sequence on one rank: it counts tokens of a rank's micro-batch."""
    logits, theirs = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)), megatron()
    weights, chosen = theirs.topk_routing_with_score_function(logits, 2)
    capacity = theirs.get_capacity(40 * 2, 8, 0.75)
    assert moe("model.seq_len=40", "model.moe_capacity=0.75").model.capacity == capacity
    _, left = theirs.apply_router_token_dropping(weights, chosen, 2, 0.75, "probs", False)
    scores = experts.scores_of(logits, "softmax")
    picks = experts.choose(scores, 2)
    mine = experts.within(picks.unsqueeze(1), experts.weights_of(scores, picks, True, 1.0).unsqueeze(1), 8,
                          capacity).squeeze(1)
    got = torch.zeros(40, 16, dtype=torch.bool).scatter(1, mine, True)[:, :8]
    assert torch.equal(got, left) and got.sum() < 80


def test_metrics_and_room(references):
    """Of 16 choices in a sequence an expert takes at most one; fewer rows than balanced ones need no room."""
    config = moe(*MESHES["ep"], "model.moe_capacity=0.5", VERIFY)
    assert config.model.capacity == 1 and config.model.room == 1
    picks = references(config, STEPS).picks
    size = config.train.global_batch_size
    for step, values in enumerate(metrics_of(config)[0]):
        mine = [torch.tensor(chosen) for (_, sample), chosen in picks.items() if sample // size == step]
        rows = sum(len(set(each.flatten().tolist())) for each in mine)
        assert values["moe/dropped"] == pytest.approx(1 - rows / sum(each.numel() for each in mine))
        assert values["moe/room"] == 0 and (values["moe/load_max"] or 0) <= 0.5


@pytest.mark.parametrize("more", [FULL, []], ids=["full", "none"])
def test_bytes(more):
    """Ranks of tp exchange their choices once, and not when they are computed again, nor in evaluation, which
    drops none."""
    config = moe(*SP, "zero.stage=0", "model.moe_capacity=1", "train.eval_every=1", *more)
    plan = make_plan(config)
    expected = [sum(sent_by(plan.table, item).get("tp", 0) for item in plan.programs[name][0])
                for name in ("train", EVALUATE)]

    def work(comm: Comm) -> list[int]:
        engine = Engine(Analysis(plan), comm)
        engine.train_step(batches(config, comm, 0))
        trained = comm.sent["tp"]
        engine.run(EVALUATE, batches(config, comm, 1, train=False))
        return [trained, comm.sent["tp"] - trained]

    assert run_loopback(plan, make_mesh(config), work) == [expected] * 2


def test_bad():
    with pytest.raises(ConfigError, match="moe_capacity=0"):
        moe("model.moe_capacity=0")

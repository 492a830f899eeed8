"""What a trainer hands to the ranks: the same global batch on every mesh, with one divisor that each rank
finds by itself."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threed.config.load import load
from threed.data.mix import open_splits
from threed.data.tokens import prepare
from threed.spec.parameter import NOT_COUNTED
from threed.tensor.context import Batch
from threed.tensor.documents import Documents
from threed.training.trainer import batches_of

EXAMPLES = [{"prompt": f"what is {i}? " + "please " * (i % 5), "answer": f"{i} is {i}" * (i % 3 + 1)}
            for i in range(60)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, some in (("a", EXAMPLES), ("b", EXAMPLES[::-1][:30])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    return folder


def opened(data, *overrides: str):
    config = load(None, [f"data.mix=['2 {data}/a.jsonl', '1 {data}/b.jsonl']", f"data.cache={data / 'cache'}",
                         "data.loss_mask=answers", "data.document_mask=true", "data.packing=best-fit",
                         "model.vocab=300", "model.seq_len=48", "train.global_batch_size=8", *overrides])
    return config, open_splits(config, prepare(config.data, config.model))[0]


def engine(config, replica: int, reads: bool) -> Any:
    """What a batch is made for: a rank of the first position of three, or of the second."""
    here = SimpleNamespace(replica=replica, position=0 if reads else 1)
    table = SimpleNamespace(last=2, position=lambda stage: stage)
    return SimpleNamespace(config=config, comm=SimpleNamespace(here=here), plan=SimpleNamespace(table=table))


def global_batch(config, split, start: int, reads: bool = True) -> list[Batch]:
    """A batch for each micro-batch of each replica, in the order of their samples."""
    made = []
    for replica in range(config.dp):
        make = batches_of(engine(config, replica, reads), split, start)
        made += [make(microbatch) for microbatch in range(config.num_microbatches)]
    return sorted(made, key=lambda batch: int(batch.samples_B[0]))


def test_every_mesh_has_the_same_global_batch(data):
    whole = []
    for overrides in (["train.micro_batch_size=8"], ["parallel.dp=4", "train.micro_batch_size=2"],
                      ["parallel.dp=2"]):
        config, split = opened(data, *overrides)
        for start in (0, 8, 800):  # 800: many epochs on
            batches = global_batch(config, split, start)
            parts = [torch.cat([batch.parts()[name] for batch in batches])
                     for name in ("tokens_BS", "labels_BS", "samples_B", "positions_BS")]
            counts = {int(batch.num_tokens) for batch in batches}
            assert counts == {int((parts[1] != NOT_COUNTED).sum())} == {split.count(start, start + 8)}
            whole.append((start, parts))
    for start, parts in whole[3:]:
        want = next(each for first, each in whole if first == start)
        assert all(map(torch.equal, parts, want))


def test_a_rank_between_has_documents_and_no_tokens(data):
    """Attention on every stage needs the positions; the divisor is for any layer that adds to the loss."""
    config, split = opened(data)
    for ends, between in zip(global_batch(config, split, 16), global_batch(config, split, 16, False),
                             strict=True):
        assert not between.tokens_BS.numel() and not between.labels_BS.numel()
        assert ends.documents is not None and between.documents is not None
        assert between.documents.ends == ends.documents.ends and between.num_tokens == ends.num_tokens
        assert torch.equal(between.documents.positions_BS, ends.documents.positions_BS)


def test_a_batch_in_which_nothing_counts(data):
    config, split = opened(data)
    split.count = lambda start, stop: 0  # pyright: ignore
    assert all(int(batch.num_tokens) == 1 for batch in global_batch(config, split, 0))


def test_a_batch_without_masks_has_a_plain_number(data):
    config = load(None, ["data.source=python-stdlib", "train.global_batch_size=4"])
    batch = batches_of(engine(config, 0, False), None, 0)(0)  # pyright: ignore[reportArgumentType]
    assert batch.num_tokens == config.tokens_per_step and not batch.masked and batch.documents is None


def test_all_of_it_is_copied_at_once(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    window, positions = torch.arange(10).view(2, 5), torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    batch = Batch(window[:, :-1], window[:, 1:], torch.arange(2), 0, torch.tensor(7), True,
                  Documents.of(positions))
    moved = batch.to(torch.device("meta"))
    assert moved.parts().keys() == batch.parts().keys()
    assert all(part.is_meta for part in moved.parts().values())
    assert moved.documents is not None and moved.documents.ends == ((2, 4), (4,))

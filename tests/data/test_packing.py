"""Packing: no token is lost or seen twice, no window overflows, and little is padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.files import write
from threed.data.packing import BestFit, WindowStream, best_fit, cut, efficiency
from threed.data.samples import splits
from threed.schema import DataConfig
from threed.spec.parameter import NOT_COUNTED


def plainly(sizes: list[int], room: int) -> int:
    """The number of bins of best-fit decreasing, item by item."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [each for each in left if each >= size]
        if fits:
            left.remove(min(fits))
        left.append((min(fits) if fits else room) - size)
    return len(left)


@given(st.integers(1, 40).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room)))))
def test_best_fit(given):
    room, sizes = given
    bins = best_fit(np.array(sizes, np.int64), room)
    count = int(bins.max(initial=-1)) + 1
    assert (bins >= 0).all() and (np.bincount(bins, sizes, minlength=count) <= room).all()
    assert count == plainly(sizes, room)


def test_a_million_documents_in_a_moment():
    """(About a second. Item by item it is minutes.)"""
    sizes = np.minimum(np.random.default_rng(0).lognormal(6, 1.2, 200_000).astype(np.int64) + 1, 4096)
    bins = best_fit(sizes, 4096)
    assert sizes.sum() / (4096 * (bins.max() + 1)) > 0.99


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 12))
def test_every_token_is_a_label_once(lengths, seq_len):
    """Except the first of each document, which nothing predicts."""
    ends = np.cumsum(lengths)
    bounds = np.stack([ends - lengths, ends], 1)
    packed = BestFit(bounds, seq_len)
    labels = [first + 1 + i for window in range(packed.num_windows)
              for first, count in packed.runs(window).tolist() for i in range(count)]
    assert sorted(labels) == [token for start, stop in bounds.tolist() for token in range(start + 1, stop)]
    assert all(packed.runs(window)[:, 1].sum() <= seq_len for window in range(packed.num_windows))
    assert packed.padded == packed.num_windows * seq_len - len(labels)


def test_long_documents_are_cut():
    assert cut(np.array([[0, 8], [8, 9], [9, 9], [9, 12]]), 3).tolist() == [[0, 3], [3, 3], [6, 1], [9, 2]]


def test_efficiency():
    assert efficiency([WindowStream(0, 17, 8)]) == 1.0
    assert efficiency([BestFit(np.array([[0, 7], [7, 10]]), 8)]) == 1.0
    assert efficiency([BestFit(np.array([[0, 7], [7, 14]]), 8)]) == 0.75


DOCUMENTS = [list(range(start, start + 10 + start // 100)) for start in range(0, 2000, 100)]


def by_position(prefix, data: DataConfig) -> list[tuple]:
    """(document, place, label) of each label that counts, in all windows. The tokens tell all three."""
    train, _ = splits(prefix, 16, 1, 0, None, data)
    found = []
    for index in range(train.num_windows):
        (inputs, labels), positions = train.sample(index), train.positions(index)
        counts = labels != NOT_COUNTED
        assert counts.sum() == train.counted(index)
        assert positions[0] == 0 and ((np.diff(positions) == 1) | (positions[1:] == 0)).all()
        assert (labels[counts] == inputs[counts] + 1).all()  # within a document
        found += [*zip(inputs[counts] // 100, inputs[counts] % 100, strict=True)]
    return found


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_windows_of_documents(tmp_path, packing):
    prefix = write(tmp_path / "p", DOCUMENTS)
    found = by_position(prefix, DataConfig(document_mask=True, packing=packing))
    every = [(document, place) for document, ids in enumerate(DOCUMENTS) for place in range(len(ids) - 1)]
    assert len(found) == len(set(found)) and set(found) <= set(every)
    if packing == "best-fit":
        assert set(found) == set(every)
    else:  # the stream's end, and no label across a border
        assert len(found) > 0.9 * len(every)


def test_packed_windows_of_whole_documents(tmp_path):
    """A document that fits into a window is not cut: its positions are its own."""
    prefix = write(tmp_path / "p", [ids for ids in DOCUMENTS if len(ids) <= 17])
    train, _ = splits(prefix, 16, 1, 0, None, DataConfig(document_mask=True, packing="best-fit"))
    for index in range(train.num_windows):
        (inputs, labels), positions = train.sample(index), train.positions(index)
        counts = labels != NOT_COUNTED
        assert (positions[counts] == inputs[counts] % 100).all()


def test_a_window_inside_a_document_begins_anew(tmp_path):
    prefix = write(tmp_path / "p", [list(range(100))])
    train, _ = splits(prefix, 16, 1, 0, None, DataConfig(document_mask=True))
    assert all(train.positions(index).tolist() == list(range(16)) for index in range(train.num_windows))
    assert all(train.counted(index) == 16 for index in range(train.num_windows))


def test_empty_documents_and_exact_ends(tmp_path):
    """A window that ends with a document does not count the first token of the next one."""
    prefix = write(tmp_path / "p", [[0, 1, 2, 3], [], [4, 5, 6, 7], [8]])
    train, _ = splits(prefix, 4, 0, 0, None, DataConfig(document_mask=True))
    windows = sorted((train.sample(i).inputs.tolist(), train.sample(i).labels.tolist(), train.counted(i))
                     for i in range(train.num_windows))
    assert windows == [([0, 1, 2, 3], [1, 2, 3, NOT_COUNTED], 3), ([4, 5, 6, 7], [5, 6, 7, NOT_COUNTED], 3)]


def test_packing_does_not_depend_on_the_seed(tmp_path):
    prefix = write(tmp_path / "p", DOCUMENTS)
    data = DataConfig(document_mask=True, packing="best-fit")
    one, two = (splits(prefix, 16, seed, 0, None, data)[0] for seed in (1, 2))
    windows = [[split.sample(i).inputs.tolist() for i in range(split.num_windows)] for split in (one, two)]
    assert windows[0] != windows[1] and sorted(windows[0]) == sorted(windows[1])

"""The order of samples is a pure function of (seed, index); damaged files are refused with their numbers."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.data.files import write
from threed.base.errors import InputError
from threed.base.hashing import permute, splitmix64
from threed.data.samples import Split, Tokens, splits

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "p", [list(range(start, start + 50)) for start in range(0, 2000, 50)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_permutation(size):
    for key in (0, 1, splitmix64(7)):
        assert sorted(permute(place, size, key) for place in range(size)) == list(range(size))


def test_permutation_mixes_well():
    size, keys = 64, 4000
    first = np.bincount([permute(0, size, splitmix64(key)) for key in range(keys)], minlength=size)
    expected = keys / size
    # chi-square, 63 degrees of freedom: 1e-4 lies at 112
    assert ((first - expected) ** 2 / expected).sum() < 110
    order = [permute(place, 10_000, splitmix64(1)) for place in range(10_000)]
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


def test_permutation_of_a_huge_range():
    size = 10**15 + 7
    assert len({permute(place, size, 3) for place in range(200)}) == 200
    assert all(0 <= permute(place, size, 3) < size for place in range(200))


def test_mix_of_arrays_is_mix_of_numbers():
    values = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    assert splitmix64(values).tolist() == [splitmix64(int(value)) for value in values]


def test_windows_cover_the_split_once_an_epoch(prefix):
    train, validation = splits(prefix, 8, seed=1, validation_fraction=0.1)
    assert (train.num_tokens, validation.num_tokens) == (1800, 200)
    assert (train.num_windows, validation.num_windows) == (1799 // 8, 199 // 8)
    for epoch in range(3):
        windows = [train.window(epoch * train.num_windows + i) for i in range(train.num_windows)]
        assert sorted(int(window[0]) for window in windows) == list(range(0, train.num_windows * 8, 8))
        for window in windows:
            assert window.dtype == np.int64 and window.tolist() == list(range(window[0], window[0] + 9))


def test_order_is_pure_and_keyed_by_seed_and_epoch(prefix):
    def order(seed, first, count):
        train, _ = splits(prefix, 8, seed, 0.1)
        return [int(train.window(i)[0]) for i in range(first, first + count)]

    n = splits(prefix, 8, 1, 0.1)[0].num_windows
    whole = order(1, 0, 2 * n)
    assert whole == order(1, 0, 100) + order(1, 100, 2 * n - 100)  # another reader, begun elsewhere
    train, _ = splits(prefix, 8, 1, 0.1)
    assert whole == [int(train.window(i)[0]) for i in reversed(range(2 * n))][::-1]
    assert whole[:n] != whole[n:]
    # not a shift of seed against epoch either
    assert whole[:n] != order(2, 0, n) and whole[n:] != order(2, 0, n)
    assert whole[:5] == [112, 1328, 1648, 560, 1664]  # pinned: a resumed run must meet the same samples


def test_validation_is_sequential(prefix):
    _, validation = splits(prefix, 8, 1, 0.1)
    starts = [int(validation.window(i)[0]) for i in range(validation.num_windows + 2)]
    assert starts == [*range(1800, 1800 + 8 * validation.num_windows, 8), 1800, 1808]


def test_exact_fit_and_one_window(tmp_path):
    for num_tokens, num_windows in ((9, 1), (16, 1), (17, 2)):
        train, validation = splits(write(tmp_path / "q", [list(range(num_tokens))]), 8, 0, 0.0)
        assert (train.num_windows, validation.num_windows, validation.num_tokens) == (num_windows, 0, 0)
        assert train.window(10**12).shape == (9,)
        with pytest.raises(AssertionError):
            validation.window(0)


def test_cut_is_at_the_nearest_document_end(tmp_path):
    path = write(tmp_path / "q", [[d] * length for d, length in enumerate((500, 380, 70, 30, 20))])
    train, validation = splits(path, 8, 0, 0.1)  # ends at 500 880 950 980 1000; 900 is wanted
    assert (train.num_tokens, validation.num_tokens) == (880, 120)
    assert validation.window(0)[0] == 2


@pytest.mark.parametrize("lengths", [[1000], [500, 500], [990, 10]])
def test_cut_inside_a_document_that_is_too_long(tmp_path, lengths):
    train, validation = splits(write(tmp_path / "q", [[1] * length for length in lengths]), 8, 0, 0.1)
    assert (train.num_tokens, validation.num_tokens) == (900, 100)


@pytest.mark.parametrize("seq_len, fraction, says", [
    (2000, 0.0,
     "2000 of 2000 tokens are for training.*seq_len \\+ 1 = 2001.*data.source.*model.seq_len=2000$"),
    (1800, 0.1, "1800 of 2000 tokens are for training.*lower data.validation_fraction"),
    (200, 0.1, "200 of 2000 tokens are for validation.*raise data.validation_fraction"),
    (8, 1e-9, "0 of 2000 tokens are for validation"),
])
def test_too_few_tokens(prefix, seq_len, fraction, says):
    with pytest.raises(InputError, match=says):
        splits(prefix, seq_len, 0, fraction)


def test_wide_tokens(tmp_path):
    tokens = Tokens(write(tmp_path / "q", [[70_000, 1], [2, 3, 4]], np.int32))
    assert tokens.stream.tolist() == [70_000, 1, 2, 3, 4] and tokens.document_ends.tolist() == [2, 5]
    assert Split(tokens, 0, 5, 4, None).window(0).tolist() == [70_000, 1, 2, 3, 4]


@pytest.mark.parametrize("gone, says", [("bin", r"p\.idx is there, but .*p\.bin is missing"),
                                        ("idx", r"p\.bin is there, but .*p\.idx is missing.* without an in")])
def test_half_a_pair(prefix, gone, says):
    Path(f"{prefix}.{gone}").unlink()
    with pytest.raises(InputError, match=says):
        Tokens(prefix)


@pytest.mark.parametrize("change, says", [
    (lambda idx: b"PK" + idx[2:], "p.idx is not a Megatron index"),
    (lambda idx: POINTER, "p.idx is a Git LFS pointer in place of the file; fetch that with git lfs pull$"),
    (lambda idx: b"<html>", "p.idx is a page that a server sent"),
    (lambda idx: b"", "p.idx is not a Megatron index"),
    (lambda idx: idx[:20], "p.idx is cut short: its header needs 34 bytes, and the file has 20"),
    (lambda idx: idx[:-1],
     "p.idx is cut short: 40 sequences in 40 documents need 842 bytes, and the file has 841"),
    (lambda idx: idx[:18] + struct.pack("<Q", 2**60) + idx[26:], "p.idx is cut short"),
    (lambda idx: idx[:9] + b"\2" + idx[10:], "version 2"),
    (lambda idx: idx[:17] + b"\7" + idx[18:], "dtype code 7"),
    (lambda idx: idx[:34] + struct.pack("<i", -5) + idx[38:], "p.idx is damaged"),
    (lambda idx: idx[:-8] + struct.pack("<q", 39), "p.idx is damaged"),
    (lambda idx: idx[:-16] + struct.pack("<q", 77) + idx[-8:], "p.idx is damaged"),
    (lambda idx: idx[:190] + struct.pack("<i", 51) + idx[194:],
     "p.bin is cut short: .*2001 tok.*4002 bytes.*has 4000"),
    (lambda idx: idx[:34] + struct.pack("<i", 49) + idx[38:],
     "p.idx lists .* is damaged: sequence 1 begins at byte 100, and those before it end at 98"),
    (lambda idx: idx[:190] + struct.pack("<i", 49) + idx[194:],
     "p.bin is too long .*1999 tok.*3998 bytes.*has 4000"),
])
def test_damaged_index(prefix, change, says):
    idx = Path(f"{prefix}.idx")
    idx.write_bytes(change(idx.read_bytes()))
    with pytest.raises(InputError, match=says):
        Tokens(prefix)


def test_a_bin_that_was_not_downloaded(prefix):
    Path(f"{prefix}.bin").write_bytes(POINTER)
    with pytest.raises(InputError, match=r"p\.bin is a Git LFS pointer in place of the file; fetch"):
        Tokens(prefix)


def test_short_bin(prefix):
    with open(f"{prefix}.bin", "r+b") as file:
        file.truncate(3999)
    with pytest.raises(InputError, match=r"p\.bin is cut short.*4000 bytes, and the file has 3999"):
        Tokens(prefix)


def test_no_tokens(tmp_path):
    with pytest.raises(InputError, match="holds no tokens"):
        Tokens(write(tmp_path / "q", [[]]))


@pytest.mark.parametrize("lengths, offsets, tail, says", [
    ([3, 1, 2], [6, 0, 2], b"", r"in another order .*: sequence 0 begins at byte 6, and those .* at 0"),
    ([1, 2, 3], [0, 4, 6], b"", r"sequence 1 begins at byte 4, and those before it end at 2"),
    ([2, 2, 2], [0, 0, 8], b"", r"sequence 1 begins at byte 0, and those before it end at 4"),
    ([1, 2, 3], [0, 1, 3], b"", r"sequence 1 begins at byte 1, and those before it end at 2"),
    ([1, 2, 3], [0, 2, 6], b"\0\1\0", r"has 3 bytes more than its 3 sequences need: the data have pictures"),
    ([1, 2], [0, 2], b"", r"m.bin is of another type, with 4 bytes a token, or too long for its .idx")])
def test_an_index_over_data_in_another_order(lengths, offsets, tail, says, tmp_path):
    """Megatron-LM follows the offsets of an index, and threed reads on: where these differ it is refused."""
    prefix = write(tmp_path / "m", [[1], [2, 3], [4, 5, 6]])
    assert Tokens(prefix).document_ends.tolist() == [1, 3, 6]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1)
    Path(f"{prefix}.idx").write_bytes(
        header + np.array(lengths, np.int32).tobytes() + np.array(offsets, np.int64).tobytes()
        + np.arange(len(lengths) + 1, dtype=np.int64).tobytes() + tail)
    with pytest.raises(InputError, match=says):
        Tokens(prefix)

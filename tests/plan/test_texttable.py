"""Tables as text: they fit a terminal, and alike rows are one."""

from __future__ import annotations

import pytest

from threed.api import plans as api
from threed.base.texttable import render, wrapped
from threed.config.load import load
from threed.planner.from_config import analysed
from threed.prediction import report
from threed.prediction.predict import predicted

HEAD = ("a rank of", "parameters", "sends pp")


def test_columns_are_aligned():
    assert render(HEAD, [("pp0", "1.5B", "1 MiB"), ("pp1", "12.5M", "10.5 MiB")]) == (
        "a rank of  parameters  sends pp\n"
        "pp0              1.5B     1 MiB\n"
        "pp1             12.5M  10.5 MiB")


@pytest.mark.parametrize(("values", "names"), [
    ("aaa", ["p0 to p2"]), ("aab", ["p0", "p1", "p2"]), ("abbbba", ["p0", "p1 to p4", "p5"]), ("a", ["p0"])])
def test_alike_rows_are_one(values, names):
    rows = [(f"p{index}", value) for index, value in enumerate(values)]
    assert [line.split("  ")[0].strip() for line in render(("", "x"), rows).splitlines()[1:]] == names
    assert len(render(("", "x"), rows, fold=False).splitlines()) == len(rows) + 1


@pytest.mark.parametrize("columns", [20, 31, 32, 60, 80, 200])
def test_a_wide_table_is_cut_into_groups_of_columns(columns):
    head = ("name", *(f"column {index}" for index in range(9)))
    text = render(head, [("first", *"123456789"), ("second", *"987654321")], columns)
    groups = text.split("\n\n")
    assert all(len(line) <= columns for line in text.splitlines())
    assert all(group.splitlines()[1].startswith("first") for group in groups)
    assert " ".join(text.split()).count("column") == 9  # each once
    assert (len(groups) == 1) == (columns == 200)


def test_each_part_of_a_cut_table_folds_its_own_rows():
    rows = [(f"pp{index}", f"{index}", "17.0 MiB", "same") for index in range(12)]
    parts = render(("rank", "own", "sends", "sent"), rows, 23).split("\n\n")
    assert [len(part.splitlines()) for part in parts] == [13, 2]
    assert parts[1].splitlines()[1] == "pp0 to pp11  same"
    assert all(len(line) <= 23 for part in parts for line in part.splitlines())


def test_a_long_name_has_a_line_of_its_own():
    name = "zero.stage=3 offload.optimizer=cpu"
    text = render(("setting", "peak"), [(name, "3.8 GiB"), ("short", "1 GiB")], 30)
    assert name in text.splitlines() and max(map(len, text.splitlines())) <= len(name)


def test_wrapped():
    text = "traffic over dp; would help: adapters twice as fast"
    assert wrapped(text, None) == text
    assert wrapped(text, 30).splitlines() == ["traffic over dp; would help:", "  adapters twice as fast"]


def large(columns: int) -> list[str]:
    config = load("configs/gpt3-175b.yaml", ["parallel.dp=2", "train.global_batch_size=192"])
    return [api.show_check(analysed(config), config, columns=columns), api.show(config, columns=columns),
            report.show(predicted(config), columns)]


def test_what_commands_print_fits_a_terminal_of_80_columns():
    """Lines of numbers; sentences wrap by themselves."""
    for text in large(80):
        rows = [line for line in text.splitlines() if line.startswith(("pp", "a rank of", "u"))]
        assert len(rows) > 16 and all(len(line) <= 80 for line in rows)


def test_many_units_are_folded():
    text = large(80)[1]
    assert "u1 to u6    pp0   blocks.0 to blocks.5    uses p1 to p6" in text
    assert "u0          pp0   embedding               uses p0 p98" in text  # the tied embedding
    assert "u97         pp15  head                    uses p97 p98" in text


def test_units_that_are_alike_in_all_blocks_are_a_line():
    """Blocks with experts, without them in between, and tiles: never a run of others as if alike."""
    def units(*overrides: str) -> list[str]:
        config = load("configs/llama3-8b.yaml", ["parallel.dp=8", "train.global_batch_size=8",
                                                 "train.micro_batch_size=1", *overrides])
        return [" ".join(line.split()) for line in api.show(config).splitlines() if line.startswith("u")]

    assert units("model.name=mixtral-8x7b", "parallel.ep=8") == [
        "u0 pp0 embedding uses p0",
        "u1, u4, ... u94 pp0 blocks.0 to blocks.31 uses p1, p4, ... p94",
        "u2, u5, ... u95 pp0 blocks.0.experts to blocks.31.experts uses p297, p300, ... p390",
        "u3, u6, ... u96 pp0 blocks.0.collect to blocks.31.collect uses no parameters",
        "u97 pp0 head uses p97"]
    every = units("model.name=mixtral-8x7b", "parallel.ep=8", "model.moe_every=2")
    assert "u4, u8, ... u64 pp0 blocks.1 to blocks.31 uses p4, p8, ... p64" in every and len(every) == 6
    dots = units("model.name=dots.llm1")
    assert dots[1] == "u1 pp0 blocks.0 uses p1" and len(dots) == 7  # dense
    assert dots[2].startswith("u2, u6, ... u242 pp0 blocks.1 to blocks.61 uses p2, p6, ... p242; p")
    tiles = units("model.tile_linears=64MiB", "zero.stage=3")
    assert tiles == ["u0 to u15 pp0 embedding 1/16 to embedding 16/16 uses p0 to p15",
                     "u16 to u303 pp0 blocks.0.attention 1/2 to blocks.31.mlp 7/7 uses p16 to p303",
                     "u304 to u319 pp0 head 1/16 to head 16/16 uses p304 to p319"]

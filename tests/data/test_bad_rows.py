"""A row that is no document: what is wrong with it, with how many, and what is done."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.files import word_level
from threed.base.errors import InputError
from threed.data.samples import Tokens
from threed.data.tokens import prepare
from threed.schema import DataConfig, ModelConfig

MODEL = ModelConfig(vocab=300)
WORDS = "?", "</s>", "hello", "good", "day", "user", "assistant"
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
GOOD = {"none": {"text": "good day"}, "answers": {"prompt": "hello", "answer": "good"},
        "chat": {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "day"}]}}
BAD = {"none": {"text": None}, "answers": {"prompt": "hello", "answer": 3}, "chat": {"messages": "hello"}}


def config(tmp_path: Path, kind: str, rows: list, loss_mask: str = "none", **more) -> DataConfig:
    """Data of rows; a text among them is a line as it stands."""
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(lines)}]" if kind == "json" else "\n".join(lines))
    tokenizer = word_level(tmp_path / "tokenizer.json", *WORDS)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    return DataConfig(str(path), tokenizer=str(tokenizer), cache=str(tmp_path / "cache"), loss_mask=loss_mask,
                      **more)


def documents(data: DataConfig) -> list[list[int]]:
    tokens = Tokens(prepare(data, MODEL).prefix)
    return [part.tolist() for part in np.split(tokens.stream, tokens.document_ends[:-1])]


@pytest.mark.parametrize("loss_mask", ["none", "answers", "chat"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
def test_bad_rows_are_skipped_and_counted(tmp_path, kind, loss_mask):
    good, bad = GOOD[loss_mask], BAD[loss_mask]
    if kind == "parquet":  # whose columns have one type
        key = list(bad)[-1]
        bad = {**bad, key: None}
    data = config(tmp_path, kind, [good, bad, good, bad, good], loss_mask)
    with pytest.raises(InputError, match=r"of 5 rows of .* 2 are so; repair them, or set data.on_bad_ro"):
        prepare(data, MODEL)
    skip = replace(data, on_bad_row="skip", bad_rows_limit=2)
    prepared, said = prepare(skip, MODEL), []
    (note,) = (note for note in prepared.notes if "on_bad_row" in note)
    assert f"{data.source}: 2 of 5 documents are skipped (data.on_bad_row=skip): 2 field " in note
    assert note.endswith((f"({data.source}:2)", f"({data.source}, item 1)", f"({data.source}, row 1)"))
    assert prepare(skip, MODEL, said.append).cached and f"threed: warning: {note}" in said
    without = config(tmp_path, kind, [good] * 3, loss_mask)
    assert documents(skip) == documents(without)
    with pytest.raises(InputError, match=r"2 rows cannot be used: 2 field .* data.bad_rows_limit=1; repair"):
        prepare(replace(config(tmp_path, kind, [good, bad, good, bad, good], loss_mask),
                        on_bad_row="skip", bad_rows_limit=1), MODEL)  # the limit is part of the cache's key


def test_reasons_are_told_apart(tmp_path):
    rows = [GOOD["none"], '{"text": ', '"text"', {"body": "x"}, {"text": 1}, {"text": "\ud800"}, "\0\0"]
    data = config(tmp_path, "jsonl", rows, on_bad_row="skip")
    (note,) = prepare(data, MODEL).notes
    for reason in ("1 not a line of JSON (", "1 a text, not an object (", "1 no field 'text' (",
                   "1 field 'text' is a number, not a text (", "1 field 'text' is not valid Unicode (",
                   "1 NUL bytes ("):
        assert reason in note
    assert "6 of 7 documents are skipped" in note


@pytest.mark.parametrize("rows, says", [
    # the key is right in the other lines: no advice about it
    ([GOOD["none"]] * 3 + [{"text": None}], r"a.jsonl:4: field 'text' is null, not a text; of 4 rows of "
     r"a.jsonl 1 is so; repair it, or set data.on_bad_row=skip, which leaves such rows out and counts them$"),
    ([GOOD["none"], {"body": "x"}], r"no field 'text' \(the fields are: body\) \(here field 'body' would f"),
    ([{"text": ["x"]}, {"text": {}}, GOOD["none"]],
     r":1: field 'text' is a list, not a text; of 3 rows of a.jsonl 1 is so, 1 more is bad otherwise; repai"),
    # it is wrong everywhere
    ([{"input_ids": [1, 2], "labels": [1, 2]}], r"'input_ids' holds token ids, and no field a text; give"),
    ([{"id": 1, "body": "x"}] * 3, r":1: no field 'text' .*, in all of 3 rows; set data.text_key to the one "
     r"that holds it, such as 'body'$"),
    ([{"text": None, "body": "x"}] * 2, r"is null, not a text, in all of 2 rows; set data.text_k.* 'body'$"),
    ([{"text": True}], r":1: field 'text' is true, not a text; set data.text_key to the one that holds it$"),
    (["[1]"] * 2, r":1: a list, not an object with fields; of 2 rows of a.jsonl 2 are so; repair them$"),
])
def test_the_value_is_looked_at_first(tmp_path, rows, says):
    with pytest.raises(InputError, match=says):
        prepare(config(tmp_path, "jsonl", rows), MODEL)


def test_the_field_that_is_missing_in_parquet_is_blamed(tmp_path):
    data = config(tmp_path, "parquet", [{"prompt": "hello", "reply": "good"}] * 2, "answers")
    with pytest.raises(InputError, match=r"row 0: no field 'answer' \(the fields are: prompt, reply\), in "
                                         r"all of 2 rows; set data.answer_key .*, such as 'reply'"):
        prepare(data, MODEL)


def test_what_is_there_twice_is_said(tmp_path):
    data = config(tmp_path, "jsonl", [GOOD["none"]] * 3 + [{"text": "hello"}, {"text": " "}, {"text": "huh"}])
    assert prepare(data, MODEL).notes == (
        f"data.source={data.source}: documents are left out: 1 of white space alone ({data.source}:5)",
        f"data.source={data.source}: 2 of 5 documents repeat another word for word; they are kept",
        f"data.source={data.source}: 7.69% of its tokens are the unknown one, 0: "
        f"data.tokenizer={data.tokenizer} is not made for this text")
    both, said = replace(data, source=DataConfig().source, mix=[f"1 {data.source}", f"2 {data.source}"]), []
    prepare(both, MODEL, said.append)
    assert any(f"data.mix: {data.source} holds the same as {data.source}" in line for line in said)

"""Which data and tokenizer a checkpoint was trained on: content counts, paths and dates do not."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.files import word_level, write
from threed.base.errors import InputError
from threed.checkpoint.format import Manifest
from threed.checkpoint.provenance import changes, check, check_named, notes
from threed.config.load import load
from threed.data import identity as subject
from threed.data.identity import identity
from threed.data.tokens import prepare
from threed.schema import Config

STEP = Path("runs/x/checkpoints/step-00000004")
WORDS = ("red", "green", "blue", "one", "two", "</s>")


@pytest.fixture
def at(tmp_path, monkeypatch):
    """at(*overrides) -> (config, identity), beside files of words."""
    monkeypatch.chdir(tmp_path)
    for name, words in (("a.jsonl", "red green blue"), ("b.jsonl", "one two one")):
        lines(Path(name), words)
    word_level(Path("tok.json"), *WORDS)

    def make(*overrides: str) -> tuple[Config, dict]:
        source = [] if any(each.startswith("data.mix") for each in overrides) else ["data.source=a.jsonl"]
        config = load(None, ["model.vocab=300", *source, "data.tokenizer=tok.json",
                             f"data.cache={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}", *overrides])
        return config, identity(config, prepare(config.data, config.model))

    return make


def lines(path: Path, words: str, count: int = 30) -> None:
    path.write_text("".join(json.dumps({"text": f"{words} {words}" * (1 + line % 3), "other": "blue"}) + "\n"
                            for line in range(count)))


def differ(before: tuple[Config, dict], now: tuple[Config, dict]) -> list[str]:
    manifest = Manifest(4, config=before[0].to_dict(), data=before[1])
    found = changes(manifest, now[1], now[0].data)
    if found:
        with pytest.raises(InputError, match=r"step 5 on, set data\.on_change=accept"):
            check(STEP, manifest, now[1], now[0])
        now[0].data.on_change = "accept"
        (line,) = notes(STEP, manifest, now[1], now[0])
        assert line.startswith("data.on_change=accept: from step 5 on ") and line.endswith("; ".join(found))
    check(STEP, manifest, now[1], now[0])
    return found


def test_the_same_content_elsewhere(at, tmp_path):
    """Under another path, date, cache, name of the file, or as one of a folder; with the tokenizer laid out
    otherwise, elsewhere."""
    before = at()
    (tmp_path / "moved").mkdir()
    shutil.copy("a.jsonl", "moved/c.jsonl")
    os.utime("a.jsonl", (1, 1))
    values = json.loads(Path("tok.json").read_text())
    Path("tok2.json").write_text(json.dumps({**values, "padding": None}, indent=3))
    for overrides in ([], ["data.source=moved/c.jsonl"], ["data.source=moved"], ["data.source=moved/*.jsonl"],
                      ["data.cache=elsewhere"], ["data.tokenizer=tok2.json"], ["data.mix=[3 a.jsonl]"]):
        assert differ(before, at(*overrides)) == [], overrides


@pytest.mark.parametrize("how", ["appended", "reordered", "changed", "shortened", "emptier"])
def test_another_content(how, at):
    before, file = at(), Path("a.jsonl")
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join({"appended": [*rows, rows[0]], "reordered": [*rows[1:], rows[0]],
                             "changed": [rows[0].replace("red", "one"), *rows[1:]], "shortened": rows[:-1],
                             "emptier": [rows[0].replace(" blue", ""), *rows[1:]]}[how]))
    assert differ(before, at()) == ["the content of a.jsonl is another"]
    assert differ(before, at("data.source=b.jsonl")) == ["the content of b.jsonl is another"]


def test_another_field_is_another_content(at):
    assert differ(at(), at("data.text_key=other")) == ["the content of a.jsonl is another"]


def test_another_tokenizer(at, tmp_path):
    """The message names the file of the run, if that is the one."""
    before = at()
    word_level(Path("other.json"), *WORDS[::-1])
    now = at("data.tokenizer=other.json")
    assert differ(before, now) == ["data.tokenizer=other.json is another tokenizer"]
    manifest = Manifest(4, config=before[0].to_dict(), data=before[1])
    now[0].data.on_change = "error"
    with pytest.raises(InputError, match=r"give the tokenizer\.json that it was trained with"):
        check(STEP, manifest, now[1], now[0])
    (tmp_path / "run").mkdir()
    shutil.copy("tok.json", tmp_path / "run" / "tokenizer.json")
    bpe = at("data.tokenizer=bpe")
    with pytest.raises(InputError, match=r"with another tokenizer: data\.tokenizer=bpe is another "):
        check(STEP, manifest, bpe[1], bpe[0])
    kept = re.escape(f"give data.tokenizer={tmp_path}/run/tokenizer.json; ")
    with pytest.raises(InputError, match=f"with another tokenizer: .*{kept}"):
        check(STEP, manifest, now[1], now[0])


def test_a_base_of_adapters(at):
    """Its data are others, and its tokenizer must be the same, also where one is trained on the data."""
    for tokenizer, other in (("tok.json", "other.json"), ("bpe", "bpe")):
        before = at(f"data.tokenizer={tokenizer}")
        manifest = Manifest(40, config=before[0].to_dict(), data=before[1])
        word_level(Path("other.json"), *WORDS[::-1])
        if tokenizer != "bpe":
            config, mine = at("data.source=b.jsonl")
            check(STEP, manifest, mine, config, base=True)
        config, mine = at("data.source=b.jsonl", f"data.tokenizer={other}")
        with pytest.raises(InputError, match=f"data.tokenizer={other} is another tokenizer.*from step 1 on"):
            check(STEP, manifest, mine, config, base=True)


def test_a_trained_tokenizer(at):
    """It follows from the data, which are to blame."""
    bpe = "data.tokenizer=bpe"
    before = at(bpe)
    assert differ(before, at(bpe)) == []
    lines(Path("a.jsonl"), "uno dos tres")
    (found,) = differ(before, at(bpe))
    assert found == ("the content of a.jsonl is another, and so is the tokenizer (data.tokenizer=bpe), which "
                     "is trained on the data")


def test_mixtures(at):
    lines(Path("c.jsonl"), "green")
    before = at("data.mix=[1 a.jsonl, 3 b.jsonl]")
    for mix, found in (
            ("2 a.jsonl, 6 b.jsonl", []),
            ("1 a.jsonl, 1 b.jsonl", ["the share of a.jsonl was 1/4 and is 1/2",
                                      "the share of b.jsonl was 3/4 and is 1/2"]),
            ("1 a.jsonl, 3 b.jsonl, 4 c.jsonl", ["c.jsonl is a new source, with a share of 1/2"]),
            ("1 a.jsonl, 3 c.jsonl", ["b.jsonl is no longer a source",
                                      "c.jsonl is a new source, with a share of 3/4"]),
            ("3 b.jsonl, 1 a.jsonl", ["data.mix has its sources in another order, and so the samples"])):
        assert differ(before, at(f"data.mix=[{mix}]")) == found, mix
    assert differ(before, at()) == ["b.jsonl is no longer a source"]
    shutil.copy("b.jsonl", "d.jsonl")
    assert differ(before, at("data.mix=[1 a.jsonl, 3 d.jsonl]")) == []
    lines(Path("b.jsonl"), "blue")
    assert differ(before, at("data.mix=[1 a.jsonl, 3 b.jsonl]")) == ["the content of b.jsonl is another"]


def test_settings_are_no_content(at):
    """They have lines of their own (checkpoint/differences)."""
    before = at()
    for overrides in (["data.append_eod=false"], ["data.validation_fraction=0.5"], ["model.seq_len=16"],
                      ["data.packing=best-fit"], ["data.document_mask=true"], ["train.seed=3"],
                      ["data.loss_mask=answers", "data.prompt_key=text", "data.answer_key=other"]):
        assert differ(before, at(*overrides)) == [], overrides


def test_megatron_data(at, monkeypatch):
    """Their own files are read; of a long one a part."""
    write(Path("m"), [[1, 2, 3], [4, 5]])
    before = at("data.source=m", "data.tokenizer=bpe")
    shutil.copy("m.bin", "n.bin")
    shutil.copy("m.idx", "n.idx")
    assert differ(before, at("data.source=n.idx", "data.tokenizer=bpe")) == []
    assert differ(before, at("data.source=m")) == []  # a tokenizer for texts, which it had not
    write(Path("m"), [[1, 2, 3, 4], [5]])  # the same tokens
    assert differ(before, at("data.source=m", "data.tokenizer=bpe")) == ["the content of m is another"]
    monkeypatch.setattr(subject, "READ_BYTES", 2 * subject._BLOCK_BYTES)
    write(Path("long"), [[7] * 300_000])
    before = at("data.source=long", "data.tokenizer=bpe")
    assert differ(before, at("data.source=long", "data.tokenizer=bpe")) == []
    write(Path("long"), [[7] * 299_999 + [8]])
    assert differ(before, at("data.source=long", "data.tokenizer=bpe")) == ["the content of long is another"]


def test_a_checkpoint_that_does_not_say(at):
    config, mine = at()
    older = Manifest(4, config=config.to_dict())
    check(STEP, older, mine, config)
    assert notes(STEP, older, mine, config) == [f"{STEP.name} does not say which data it was trained on: "
                                                "they are not compared"]
    assert notes(STEP, older, {}, config) == []
    assert changes(replace(older, data=mine), {}, config.data) == []


def test_another_order_of_files(at, tmp_path):
    """Names decide it: the message does not blame the content alone. A glob has the order of a folder."""
    for number, name in enumerate(("a-b", "a", "c")):
        (tmp_path / "d" / name).mkdir(parents=True)
        lines(tmp_path / "d" / name / "x.jsonl", f"red {WORDS[number]}")
    before = at("data.source=d")
    assert differ(before, at("data.source=d/*/*.jsonl")) == []
    (tmp_path / "d" / "c").rename(tmp_path / "d" / "d")
    assert differ(before, at("data.source=d")) == []
    (tmp_path / "d" / "d").rename(tmp_path / "d" / "A")
    says = "the content of {} is another, or its files have other names, and so another order"
    for source in ("d", "d/*/*.jsonl"):
        assert differ(before, at(f"data.source={source}")) == [says.format(source)]


def test_another_chat_template(at):
    """It is to blame where its content changes under the same name, and not the data; where its name changes,
    a note says so."""
    talk = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    Path("chat.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    for name, text in (("t.jinja", template), ("same.jinja", template), ("other.jinja", "one " + template)):
        Path(name).write_text(text)
    chat = ["data.source=chat.jsonl", "data.loss_mask=chat"]
    before = at(*chat, "data.chat_template=t.jinja")
    assert differ(before, at(*chat, "data.chat_template=same.jinja")) == []
    assert differ(before, at(*chat, "data.chat_template=other.jinja")) == []
    shutil.copy("other.jinja", "t.jinja")
    assert differ(before, at(*chat, "data.chat_template=t.jinja")) == [
        "the chat template in data.chat_template=t.jinja is another, and so are the tokens"]
    Path("chat_template.jinja").write_text(template)
    before = at(*chat)
    assert differ(before, at(*chat)) == []
    Path("chat_template.jinja").write_text("two " + template)
    says = "the chat template of data.tokenizer=tok.json is another, and so are the tokens"
    assert differ(before, at(*chat)) == [says]

# ---------------------------------------------------------------- weights that a run begins with

SOURCE, TOKENIZER = "data.source=a.jsonl", "data.tokenizer=tok.json"
KNOWN = {"sources": [{"source": "a"}], "tokenizer": "1f"}


@pytest.mark.parametrize("named, known, asked", [
    ([], KNOWN, ["source", "tokenizer"]), ([SOURCE], KNOWN, ["tokenizer"]), ([TOKENIZER], KNOWN, ["source"]),
    (["data.tokenizer=bpe"], KNOWN, ["source"]), (["data.mix=[1 a.jsonl]"], KNOWN, ["tokenizer"]),
    ([SOURCE, TOKENIZER], KNOWN, []), ([SOURCE, "data.tokenizer=bpe"], KNOWN, []),
    (["data.source=python-stdlib", "data.tokenizer=bpe"], KNOWN, []),
    (["data.mix=[1 a.jsonl]", TOKENIZER], KNOWN, []),
    ([SOURCE], {**KNOWN, "tokenizer": None}, []),  # data that are tokens already
    ([], {}, [])])  # not known: layers of your own, or a rank but the first
@pytest.mark.parametrize("kept", [False, True])
def test_imported_weights_are_trained_on_what_somebody_has_named(named, known, asked, kept, tmp_path):
    path = tmp_path / "checkpoints" / "step-00000000"
    config = load(None, named)
    manifest = Manifest(config=Config().to_dict(), weights_only=True)
    tokenizer = tmp_path / "huggingface" / "tokenizer.json"
    if kept:
        tokenizer.parent.mkdir()
        tokenizer.write_text("{}")
    if not asked:
        return check_named(path, manifest, known, config.data)
    with pytest.raises(InputError) as error:
        check_named(path, manifest, known, config.data)
    for key in ("source", "tokenizer"):
        assert (f"data.{key}=" in str(error.value)) == (key in asked), error.value
    if "tokenizer" in asked:
        assert (f"data.tokenizer={tokenizer}, which" in str(error.value)) == kept


def test_adapters_beside_weights_that_were_trained_here():
    """What nobody has named is as it was, or is refused."""
    for theirs, asked in (([], False), ([SOURCE], True), ([TOKENIZER], True)):
        manifest = Manifest(config=load(None, theirs).to_dict())
        if asked:
            with pytest.raises(InputError, match=theirs[0].partition("=")[0]):
                check_named(STEP, manifest, KNOWN, load(None).data)
        else:
            check_named(STEP, manifest, KNOWN, load(None).data)

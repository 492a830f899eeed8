"""What a conversation says about itself is heeded, or a line says that it is not: flags of messages, what a
template marks, leaves out or needs."""

from __future__ import annotations

import json

import pytest

from tests.data.files import word_level
from tests.data.test_loss_mask import CHATML, MODEL, chat, parts
from threed.base.errors import InputError
from threed.data.chat import ChatTemplate
from threed.data.prompts import encode
from threed.data.sampling import TOKENIZER
from threed.data.tokenizer import load
from threed.data.tokens import prepare
from threed.schema import DataConfig

ASK = {"role": "user", "content": "hello"}
MARKED = ("{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
          "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}assistant:{% endif %}")
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "utc"}}}


def answer(text: str, **fields) -> dict:
    return {"role": "assistant", "content": text, **fields}


def prepared(tmp_path, rows: list[dict], template: str = CHATML) -> tuple[str, list[str]]:
    """The text that counts, and the lines about the rest."""
    data = chat(tmp_path, template=template)
    with open(data.source, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    made = prepare(data, MODEL)
    said = "".join(each for _, each in parts(made, data)).replace("<|endoftext|>", "")
    return said, [note.replace(f"{tmp_path}/", "") for note in made.notes]


@pytest.mark.parametrize("flag", [
    {"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"trainable": False},
    {"loss": False}, {"loss_mask": 0}, {"step_loss_mask": 0}, {"masked": True}, {"mask": 1},
    {"ignore": True}, {"weight": 1, "train": False}], ids=str)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["turns", "marks"])
def test_a_message_that_is_not_to_count(flag, template, tmp_path):
    end = "<|im_end|>" if template is CHATML else ";"
    talk = [ASK, answer("one", **flag), ASK, answer("two")]
    assert prepared(tmp_path, [{"messages": talk}], template) == (f"two{end}", [])
    data = chat(tmp_path, [talk[2:] + talk[:2]], template)  # nor does the end of the document after it
    ((_, said),) = parts(prepare(data, MODEL), data)
    assert said == f"two{end}"


def test_a_message_that_is_to_count(tmp_path):
    talk = [ASK, answer("one", weight=1, train=True, masked=False, loss=None)]
    assert prepared(tmp_path, [{"messages": talk}]) == ("one<|im_end|>", [])
    said, (note,) = prepared(tmp_path, [{"messages": [{**ASK, "train": True}, *talk[1:]]}])
    assert said == "one<|im_end|>" and note.endswith("to count, too: 1 of role 'user' (chat.jsonl:1)")
    said, (note,) = prepared(tmp_path, [{"messages": [ASK, answer("no", weight=0)]}, {"messages": talk}])
    assert said == "one<|im_end|>" and "1 in which nothing counts (chat.jsonl:1)" in note


@pytest.mark.parametrize("value", [0.5, 2, "no", [0]])
def test_a_flag_that_is_neither(value, tmp_path):
    with pytest.raises(InputError, match=r"chat.jsonl:1: 'weight' of a message is neither 0 nor 1, but "):
        prepared(tmp_path, [{"messages": [ASK, answer("one", weight=value)]}])


@pytest.mark.parametrize("fields, says", [
    ({"weight": 0}, "1 with 'weight' beside the text, counted in full"),
    ({"masked": True}, "1 with 'masked' beside the text, counted in full"),
    ({"system": "be kind"}, "1 with 'system' beside the messages, read without it"),
    ({"images": ["a.png"]}, "1 with 'images' beside the messages, read without it"),
    ({"split": "test_sft"}, "1 of split 'test_sft' by a field of the row, trained on"),
    ({"set": "validation"}, "1 of split 'validation' by a field of the row, trained on"),
    ({"label": False}, "1 with 'label': false, as texts that are not wanted have it, counted in full"),
    ({"split": "train", "set": "a", "label": True, "weight": 1, "system": "", "id": 3}, None)], ids=str)
def test_what_stands_beside_the_messages(fields, says, tmp_path):
    said, notes = prepared(tmp_path, [{"messages": [ASK, answer("one")], **fields}])
    assert said == "one<|im_end|>"
    assert notes == ([] if says is None else
                     [f"data.source=chat.jsonl: there are rows: {says} (chat.jsonl:1)"])


def test_what_stands_beside_an_answer(tmp_path):
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "answer": "c", "train": False, "split": "dev"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"), loss_mask="answers")
    (note,) = prepare(data, MODEL).notes
    assert "1 of split 'dev' by a field of the row" in note and "1 with 'train' beside the text" in note


def test_a_template_says_what_counts(tmp_path):
    """Its marks do, and not what it adds to the messages before: a head of the answer, or nothing of the
    first. Such a template may also write earlier messages otherwise."""
    talk = [ASK, answer("ONE"), ASK, answer("TWO")]
    last = ("{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}!"
            "{% else %}{{ m.content | lower }};{% endif %}{% endfor %}")
    assert prepared(tmp_path, [{"messages": talk}], last) == ("TWO", [])
    trimmed = MARKED.replace("{% generation %}", "think {%- generation -%}  ")
    assert prepared(tmp_path, [{"messages": talk}], trimmed)[0] == "ONE;TWO;"
    template = ChatTemplate(chat(tmp_path, template=MARKED))
    assert (template.asked("hello"), template.end_of_turn()) == ("user:hello;assistant:", ";")
    last_answer = last.replace("loop.last", "loop.last and m.role == 'assistant'")
    assert prepared(tmp_path, [{"messages": talk}], last_answer) == ("TWO", [])
    talk[1]["weight"] = 0
    with pytest.raises(InputError, match=r"does not mark each answer by .*, so .* what message 1,"):
        prepared(tmp_path, [{"messages": talk}], last_answer)
    assert prepared(tmp_path, [{"messages": talk[1:]}], MARKED) == ("TWO;", [])
    with pytest.raises(InputError, match=r"has one {% generation %} in another, or the text has U\+FDD0"):
        prepared(tmp_path, [{"messages": [ASK, answer("a\ufdd0b")]}], MARKED)


def test_marks_of_a_template_are_those_of_transformers(tmp_path):
    """The spans of its return_assistant_tokens_mask."""
    chats = pytest.importorskip("transformers.utils.chat_template_utils")
    talk = [ASK, answer("one"), ASK, answer("two")]
    ((whole,), (spans,)) = chats.render_jinja_template([talk], chat_template=MARKED,
                                                       return_assistant_tokens_mask=True)
    data = chat(tmp_path, [talk], MARKED)
    segments = ChatTemplate(data).render(talk, None, "here")
    assert "".join(segment.text for segment in segments) == whole
    assert [segment.text for segment in segments if segment.counts] == [whole[slice(*span)] for span in spans]


@pytest.mark.parametrize("row, says", [
    ({"messages": [ASK, answer("one", tool_calls=[CALL])]}, "1 'tool_calls' in role 'assistant'"),
    ({"messages": [ASK, answer("one", reasoning_content="hm")]}, "1 'reasoning_content' in role 'assistant'"),
    ({"messages": [{**ASK, "name": "bob"}, answer("one")]}, "1 'name' in role 'user'"),
    ({"messages": [{**ASK, "images": ["a.png"]}, answer("one")]}, "1 'images' in role 'user'"),
    ({"messages": [ASK, answer("one")], "tools": [CALL]}, "1 'tools' beside them"),
    ({"messages": [{"role": "system", "content": "x"}, ASK, answer("one")]}, "1 of role 'system'"),
    ({"messages": [{"role": "critic", "content": "x"}, ASK, answer("one")]}, "1 of role 'critic'")], ids=str)
def test_what_a_template_leaves_out(row, says, tmp_path):
    known = CHATML.replace("messages %}", "messages if m['role'] in ('user', 'assistant', 'tool') %}", 1)
    said, (note,) = prepared(tmp_path, [row], known)
    assert said == "one<|im_end|>" and note == (
        "data.source=chat.jsonl: chat.jinja does not write these messages or parts of them, so they are "
        f"no part of the text, and change nothing of what counts: {says} (chat.jsonl:1)")


def test_what_a_template_writes_is_no_line(tmp_path):
    template = ("{{ tools }}{% for m in messages %}{{ m.role }}{{ m.name }}{{ m.tool_calls }}"
                "{{ m.content | upper }};{% endfor %}{% if add_generation_prompt %}assistant{% endif %}")
    talk = [{**ASK, "name": "bob"}, answer("", tool_calls=[CALL]),
            {"role": "tool", "content": "noon", "tool_call_id": "c1"}, answer("it is noon", refusal=None)]
    said, notes = prepared(tmp_path, [{"messages": talk, "tools": json.dumps([CALL])}], template)
    assert "clock" in said and said.endswith("IT IS NOON;") and notes == []


def test_an_answer_that_only_calls_is_not_learned_as_none(tmp_path):
    with pytest.raises(InputError, match=r"holds 'tool_calls' alone, which .*chat.jinja does not write: "
                                         r"message 1; give a data.chat_template"):
        prepared(tmp_path, [{"messages": [ASK, answer("", tool_calls=[CALL])]}])


@pytest.mark.parametrize("template, says", [
    ("", "chat.jinja writes nothing of what the assistant says; give another data.chat_template"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "chat.jinja writes nothing"),
    (CHATML + "{% if tools %}{% generation %}{% endgeneration %}{% endif %}", "marks nothing of these"),
    (json.dumps({"chat_template": CHATML}), "chat.jinja is JSON, and no Jinja file; give")])
def test_a_template_that_leaves_out_the_answers_is_to_blame(template, says, tmp_path):
    with pytest.raises(InputError, match=says):
        prepared(tmp_path, [{"messages": [ASK, answer("one")]}], template)


def test_nobody_is_called_assistant(tmp_path):
    talk = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]
    with pytest.raises(InputError, match=r"no message has role 'assistant', the one that counts \(roles that "
                                         r"are not known: gpt, human\)"):
        prepared(tmp_path, [{"messages": talk}])


@pytest.mark.parametrize("tools, says", [("[", "a text, and no JSON"), ({"a": 1}, "an object, not a list")])
def test_tools_that_are_none(tools, says, tmp_path):
    with pytest.raises(InputError, match=f"field 'tools' is {says}"):
        prepared(tmp_path, [{"messages": [ASK, answer("one")], "tools": tools}])


def test_null_is_not_there(tmp_path):
    """Parquet has each field of a column in each object of it."""
    import pyarrow
    import pyarrow.parquet

    calls = "(m['tool_calls'] | tojson if 'tool_calls' in m else '')"
    template = CHATML.replace("m['content']", f"m['content'] + {calls}")
    talk = [ASK, answer("", tool_calls=[{"name": "a", "arguments": {"x": 1}}]), ASK,
            answer("one", tool_calls=[{"name": "b", "arguments": {"y": 2}}]), ASK, answer("two")]
    data = chat(tmp_path, template=template)
    data.source = str(tmp_path / "talks.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk}]), data.source)
    assert "null" not in "".join(map("".join, parts(prepare(data, MODEL), data)))


def test_functions_of_templates(tmp_path):
    talk = [ASK, answer("one")]
    template = "{{ {'b': 'é', 'a': [1]} | tojson(sort_keys=true, separators=(',', ':')) }}"
    data = chat(tmp_path, [talk], template + CHATML)
    ((rest, _),) = parts(prepare(data, MODEL), data)
    assert rest.startswith('{"a":[1],"b":"é"}<|im_start|>')
    for fault in ("{{ 'abc'.index('z') }}", "{{ 1 // 0 }}", "{{ [].pop() }}", "{{ nothing.at.all }}"):
        with pytest.raises(InputError, match=r"chat.jsonl:1: .*chat.jinja refuses the messages: "):
            prepare(chat(tmp_path, [talk], fault + CHATML), MODEL)


def test_a_template_for_tools(tmp_path):
    """Of several that a tokenizer has, the one for tools writes conversations with tools."""
    word_level(tmp_path / TOKENIZER, "?", "</s>")
    both = {"default": CHATML, "tool_use": "{{ tools }}" + CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [
        {"name": name, "template": template} for name, template in both.items()]}))
    talk = [ASK, answer("one")]
    data = DataConfig(tokenizer=str(tmp_path), loss_mask="chat")

    def written(tools: list | None) -> str:
        return "".join(segment.text for segment in ChatTemplate(data).render(talk, tools, "here"))

    assert written([7]) == "[7]" + written(None)
    (tmp_path / "chat_template.jinja").write_text("!" + CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}" + CHATML)
    assert written([7])[:3] == "[7]" and written(None)[0] == "!"


def test_special_tokens_that_a_template_names(tmp_path):
    """Of either file beside a tokenizer; one that is null is not defined, as in transformers. A run keeps
    them."""
    from threed.data.prompts import keep_tokenizer

    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    file = word_level(home / TOKENIZER, "<s>", "</s>", "hello", "sep")
    (home / "tokenizer_config.json").write_text(json.dumps({"unk_token": None, "sep_token": "sep"}))
    (home / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (home / "chat_template.jinja").write_text(
        "{{ bos_token }} {{ sep_token }} {{ unk_token is defined }} {{ messages[0].content }}")
    data = DataConfig(tokenizer=str(home), loss_mask="chat")
    assert ChatTemplate(data).asked("hello") == "<s> sep False hello"
    assert keep_tokenizer(file, data, run) == []
    mine = DataConfig(tokenizer=str(run / TOKENIZER), loss_mask="chat")
    assert ChatTemplate(mine).asked("hello") == "<s> sep False hello"
    assert encode(load(run / TOKENIZER), ["hello"], mine, MODEL).ids

"""Which tokens count: of examples with prompt and answer, and of conversations under a chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.files import word_level, write
from threed.base.errors import InputError
from threed.data.chat import ChatTemplate
from threed.data.corpus import TextSegment
from threed.data.prompts import encode
from threed.data.samples import Tokens, splits
from threed.data.tokenizer import load
from threed.data.tokens import prepare
from threed.schema import DataConfig, ModelConfig
from threed.spec.parameter import NOT_COUNTED

MODEL = ModelConfig(vocab=300)
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
TALK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "good day"}, {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "farewell"}]


def answers(tmp_path, count: int = 20, **values) -> DataConfig:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"what is {i}? ", "answer": f"it is {i}"})
                              for i in range(count)))
    return DataConfig(str(path), cache=str(tmp_path / "cache"), loss_mask="answers", **values)


def chat(tmp_path, talks=(TALK,), template: str = CHATML, **values) -> DataConfig:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    (tmp_path / "chat.jinja").write_text(template)
    return DataConfig(str(path), cache=str(tmp_path / "cache"), loss_mask="chat",
                      chat_template=str(tmp_path / "chat.jinja"), **values)


def parts(prepared, data) -> list[tuple[str, str]]:
    """(text that does not count, text that counts) of each document."""
    tokens, tokenizer = Tokens(prepared.prefix), load(prepared.tokenizer)
    assert tokens.mask is not None
    cuts = tokens.document_ends[:-1]
    return [(tokenizer.decode(ids[mask == 0].tolist()), tokenizer.decode(ids[mask == 1].tolist()))
            for ids, mask in zip(np.split(tokens.stream, cuts), np.split(tokens.mask, cuts), strict=True)]


def test_answers_count(tmp_path):
    data = answers(tmp_path)
    prepared = prepare(data, MODEL)
    assert sorted(parts(prepared, data)) == sorted((f"what is {i}? ", f"it is {i}<|endoftext|>")
                                                   for i in range(20))
    assert prepare(data, MODEL).cached
    assert not prepare(replace(data, answer_key="prompt", prompt_key="answer"), MODEL).cached


def test_what_the_assistant_says_counts(tmp_path):
    data = chat(tmp_path)
    assert ChatTemplate(data).render(TALK, None, "here") == [
        TextSegment("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
                    "<|im_start|>assistant\n", False),
        TextSegment("good day<|im_end|>"), TextSegment("\n", False),
        TextSegment("<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n", False),
        TextSegment("farewell<|im_end|>"), TextSegment("\n", False)]
    ((_, said),) = parts(prepare(data, MODEL), data)
    assert said == "good day<|im_end|>farewell<|im_end|><|endoftext|>"


def test_special_tokens_of_a_template_are_tokens(tmp_path):
    import tokenizers

    path = word_level(tmp_path / "tokenizer.json", "?", "<eos>", "hello", "good", "day", "user", "assistant")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    data = chat(tmp_path, [TALK[1:3]], tokenizer=str(path))
    data.chat_template = None
    prepared = prepare(data, MODEL)
    tokens = Tokens(prepared.prefix)
    assert tokens.stream.tolist() == [7, 5, 2, 8, 7, 6, 3, 4, 8, 1]
    assert tokens.mask is not None and tokens.mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("packing", ["stream", "best-fit"])
def test_labels_that_do_not_count(tmp_path, packing):
    data = answers(tmp_path, packing=packing, document_mask=True)
    tokens = Tokens(prefix := prepare(data, MODEL).prefix)
    train, _ = splits(prefix, 48, 1, 0, 300, data)
    total = 0
    for index in range(train.num_windows):
        inputs, labels = train.sample(index)
        counts = labels != NOT_COUNTED
        assert counts.sum() == train.counted(index)
        total += train.counted(index)
        inside = counts[:-1] & (train.positions(index)[1:] > 0)
        assert (labels[:-1][inside] == inputs[1:][inside]).all()
    assert train.count(0, train.num_windows) == total
    if packing == "best-fit":
        assert tokens.mask is not None and total == tokens.mask.sum()  # all of all answers


def test_too_long_examples_are_cut_and_counted(tmp_path):
    data = answers(tmp_path, packing="best-fit", document_mask=True)
    tokens = Tokens(prefix := prepare(data, MODEL).prefix)
    lengths = np.diff(tokens.document_ends, prepend=0)
    train, _ = splits(prefix, int(lengths.min()) - 2, 1, 0, 300, data)
    assert train.cut_off == len(lengths) and train.dropped == 0
    assert tokens.mask is not None and 0 < train.count(0, train.num_windows) < tokens.mask.sum()
    with pytest.raises(InputError, match=r"of the 20 examples for training none has.*raise model.seq_len"):
        splits(prefix, 2, 1, 0, 300, data)


@pytest.mark.parametrize("line, says", [
    ('{"prompt": "a"}', "no field 'answer' .*prompt.*of 21 rows of a.jsonl 1 is so"),
    ('{"prompt": "a", "answer": 3}', "is a number, not a text"),
    ('{"answer": "a"}', "no field 'prompt'"),
])
def test_bad_examples(tmp_path, line, says):
    data = answers(tmp_path)
    with open(data.source, "a") as file:
        file.write("\n" + line)
    with pytest.raises(InputError, match=rf"a.jsonl:21: .*{says}"):
        prepare(data, MODEL)


@pytest.mark.parametrize("talk, says", [
    ([], "is a list without messages"), ("hello", "is a text, not a list of messages"),
    (["hello"], "role and content: message 0 is not"),
    ([{"role": "user", "content": 3}], "content of a message .*is a number, not a text"),
    ([{"role": "user"}], "content of a message .*is null, not a text: message 0"),
    ([{"content": "x"}], "role and content: message 0 is not"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "is a list, not a text"),
    ([*TALK[1:3], {"role": "judge", "content": "x"}, *TALK[1:3]], "refuses the messages: no judges"),
])
def test_bad_conversations(tmp_path, talk, says):
    refuses = ("{% for m in messages %}{% if m['role'] == 'judge' %}{{ raise_exception('no judges') }}"
               "{% endif %}{% endfor %}")
    with pytest.raises(InputError, match=rf"chat.jsonl:2: .*{says}"):
        prepare(chat(tmp_path, [TALK, talk], refuses + CHATML), MODEL)


def chat_tokenizer(tmp_path, template: str = CHATML):
    """A tokenizer of words that begins each text with <s>; its chat template beside it."""
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    path = word_level(tmp_path / "tokenizer.json", "?", "</s>", "hello", "good", "day", "user", "assistant")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    inner.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 9)])  # pyright: ignore
    inner.save(str(path))
    (tmp_path / "chat_template.jinja").write_text(template)
    return path


def test_prompts_of_a_chat_are_as_in_training(tmp_path):
    """Markers that are text, an answer's head that is missing, <s> twice or not at all, a turn that does not
    end."""
    data = DataConfig(tokenizer=str(chat_tokenizer(tmp_path)), loss_mask="chat", prepend_bos=True)
    made = encode(load(data.tokenizer), ["hello"], data, MODEL)
    assert made == ([[9, 7, 5, 2, 8, 7, 6]], 10, (1, 8))
    (tmp_path / "chat_template.jinja").write_text("<s>" + CHATML)  # which writes <s> itself
    assert encode(load(data.tokenizer), ["hello"], data, MODEL) == made
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"},
                                             {"role": "assistant", "content": "good day"}]}))
    data = replace(data, source=str(talk), cache=str(tmp_path / "cache"))
    assert Tokens(prepare(data, MODEL).prefix).stream.tolist() == [*made.ids[0], 3, 4, 8, 1]
    plain = replace(data, loss_mask="none")
    assert encode(load(data.tokenizer), ["<s> hello", "hello"], plain, MODEL).ids == [[9, 2], [9, 2]]


def test_a_document_begins_as_its_tokenizer_says(tmp_path):
    path = chat_tokenizer(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("hello", "good day")))
    data = DataConfig(str(tmp_path / "a.jsonl"), tokenizer=str(path), cache=str(tmp_path / "cache"))
    without = prepare(data, MODEL)
    prepared = prepare(data := replace(data, prepend_bos=True), MODEL)
    assert prepared.prefix != without.prefix
    documents = [part.tolist() for part in np.split(Tokens(prepared.prefix).stream,
                                                    Tokens(prepared.prefix).document_ends[:-1])]
    assert sorted(documents) == [[9, 2, 1], [9, 3, 4, 1]]
    (tmp_path / "b.jsonl").write_text('{"prompt": "hello", "answer": "good"}')
    asked = prepare(replace(data, source=str(tmp_path / "b.jsonl"), loss_mask="answers"), MODEL)
    tokens = Tokens(asked.prefix)
    assert tokens.mask is not None
    assert (tokens.stream.tolist(), tokens.mask.tolist()) == ([9, 2, 3, 1], [0, 0, 1, 1])
    bare = word_level(tmp_path / "bare.json", "?", "</s>", "hello")
    with pytest.raises(InputError, match=r"prepend_bos=true, but .* puts no token before a text"):
        prepare(replace(data, tokenizer=str(bare)), MODEL)


def test_a_template_that_ends_documents_itself(tmp_path):
    """An end-of-text token twice."""
    path = chat_tokenizer(tmp_path, "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    inner = json.loads(path.read_text())
    inner["added_tokens"].append({"id": 1, "content": "</s>", "special": True, "single_word": False,
                                  "lstrip": False, "rstrip": False, "normalized": False})
    inner["added_tokens"].sort(key=lambda each: each["id"])
    path.write_text(json.dumps(inner))
    data = chat(tmp_path, [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good"}]],
                tokenizer=str(path))
    prepared = prepare(replace(data, chat_template=None), MODEL)
    assert Tokens(prepared.prefix).stream.tolist() == [2, 1, 3, 1]


def test_tools(tmp_path):
    """A call in place of a text; tools that the template describes."""
    template = ("{% if tools %}tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
                "{{ m['role'] }}: {{ m['content'] }}"
                "{% for call in m['tool_calls'] or [] %}<{{ call['name'] }}>{% endfor %};{% endfor %}"
                "{% if add_generation_prompt %}assistant: {% endif %}")
    talk = [{"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]},
            {"role": "tool", "content": "noon"}, {"role": "assistant", "content": "It is noon."}]
    data = chat(tmp_path, template=template)
    Path(data.source).write_text(json.dumps({"messages": talk, "tools": [{"name": "clock"}]}))
    ((rest, said),) = parts(prepare(data, MODEL), data)
    assert said == "<clock>;It is noon.;<|endoftext|>"
    assert rest == 'tools: [{"name": "clock"}]\nuser: hi;assistant: tool: noon;assistant: '


def test_nobody_answers(tmp_path):
    with pytest.raises(InputError, match=r"\(1 in which nothing counts .*; give some in which there is an"):
        prepare(chat(tmp_path, [TALK[:2]]), MODEL)


def test_an_example_is_counted_once_however_many_windows_it_spans(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"prompt": "p", "answer": "a" * 400}] * 3 + [{"prompt": "p" * 400, "answer": "a" * 400}] * 2
    path.write_text("\n".join(map(json.dumps, lines)))
    data = DataConfig(str(path), cache=str(tmp_path / "cache"), loss_mask="answers", packing="best-fit")
    train, _ = splits(prepare(data, ModelConfig(vocab=257)).prefix, 32, 1, 0, 257, data)
    assert (train.cut_off, train.dropped) == (3, 2)


def test_a_template_that_rewrites_messages_is_refused(tmp_path):
    template = "{% for m in messages %}{{ m['content'] if loop.last else '-' }};{% endfor %}"
    says = r"chat.jsonl:1: .*writes the messages before an answer otherwise .* before message 2"
    with pytest.raises(InputError, match=says):
        prepare(chat(tmp_path, template=template), MODEL)


def test_no_template(tmp_path):
    data = chat(tmp_path)
    data.chat_template = None
    with pytest.raises(InputError, match=r"data.tokenizer=bpe brings none.*data.chat_template"):
        prepare(data, MODEL)
    data.tokenizer = str(word_level(tmp_path / "tokenizer.json", "?", "<eos>"))
    with pytest.raises(InputError, match=r"has neither chat_template.jinja nor"):
        prepare(data, MODEL)
    data.chat_template = str(tmp_path / "none.jinja")
    with pytest.raises(InputError, match=r"none.jinja cannot be read as text: No such file"):
        prepare(data, MODEL)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    data.chat_template = str(tmp_path / "bad.jinja")
    with pytest.raises(InputError, match=r"bad.jinja is not a chat template"):
        prepare(data, MODEL)


def test_sources_that_do_not_say_what_counts(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    data = answers(tmp_path)
    data.source = str(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"holds plain text.*set data.loss_mask=none"):
        prepare(data, MODEL)
    data.source = str(write(tmp_path / "m", [[1, 2]]))
    with pytest.raises(InputError, match=r"Megatron data.*set data.loss_mask=none"):
        prepare(data, MODEL)


def test_examples_of_which_nothing_counts_are_left_out(tmp_path):
    talks = [TALK, TALK[:2]]
    data = chat(tmp_path, talks)
    prepared = prepare(data, MODEL)
    note = f"data.source={data.source}: documents are left out: 1 in which nothing counts ({data.source}:2)"
    assert prepared.num_documents == 1 and prepared.notes == (note,)
    said = []
    assert prepare(data, MODEL, said.append).cached and f"threed: warning: {note}" in said
    with pytest.raises(InputError, match=r"holds no example of which something counts"):
        prepare(chat(tmp_path, [TALK[:2]]), MODEL)


def test_a_mask_that_is_damaged_or_missing_is_refused(tmp_path):
    data = answers(tmp_path)
    path = prepare(data, MODEL).prefix.with_suffix(".mask")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"tokens.mask does not have the checksum"):
        prepare(data, MODEL)
    path.write_bytes(bytes([1 - content[0], *content[1:]]))
    with pytest.raises(InputError, match=r"tokens.mask does not have the checksum"):
        prepare(data, MODEL)
    path.unlink()
    with pytest.raises(InputError, match=r"prepared data is damaged"):
        prepare(data, MODEL)

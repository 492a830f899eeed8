"""Chat: messages to text by a tokenizer's chat template, and which of the text the assistant says.

The text of the assistant's turn is what the template adds to the messages before it, written as the beginning
of an answer (add_generation_prompt). So what is learned is what a model is asked for when it answers, with
the token that ends the turn. White space after that is not counted.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.data.corpus import Segments, TextSegment
from threed.data.rows import BadRow
from threed.data.tokenizer_files import CONFIG, read_object, tokenizer_file
from threed.schema import DataConfig

BESIDE = "chat_template.jinja"  # beside tokenizer.json, or in the field chat_template of:
_ANSWER = "threed"  # that no template writes by itself


class ChatTemplate:
    """A chat template as Hugging Face tokenizers have it: Jinja, with the same settings and functions."""

    def __init__(self, data: DataConfig):
        """InputError where there is no template, or it is not one."""
        folder = None if data.tokenizer == "bpe" else tokenizer_file(data.tokenizer).parent
        config = read_object(folder / CONFIG) if folder is not None else {}
        self.path, self.text = _found(data, folder, config)
        # The tokens that templates name: a text, or an object with the text as its content.
        named = {name: config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self.tokens = {name: value.get("content", "") if isinstance(value, dict) else value or ""
                       for name, value in named.items()}
        assert self._compiled is not None

    @property
    def identity(self) -> str:
        """All that decides which text messages become."""
        return repr((self.text, sorted(self.tokens.items())))

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = to_json
        # Today's date would make other data each day.
        environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2024, 7, 26).strftime}
        try:
            return environment.from_string(self.text)
        except jinja2.TemplateError as error:
            raise InputError(f"{self.path} is not a chat template: {error}") from None

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, where: str) -> Segments:
        """The segments of a conversation. InputError where the template refuses it, or does not write
        messages one after the other."""
        segments: Segments = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:number], where, tools, add_generation_prompt=True)
            answered = self._text(messages[:number + 1], where, tools)
            if not (prompt.startswith(done) and answered.startswith(prompt)):
                raise BadRow(where, f"{self.path} writes the messages before an answer otherwise once it "
                             "follows", f", here before message {number}, so what the assistant says cannot "
                             "be told; give another data.chat_template, or one turn a conversation")
            answer = answered[len(prompt):]
            said = answer.rstrip()
            segments += [TextSegment(prompt[len(done):], False), TextSegment(said, True),
                         TextSegment(answer[len(said):], False)]
            done = answered
        return [segment for segment in segments if segment.text]

    def asked(self, text: str) -> str:
        """What a user says, as the beginning of an answer."""
        return self._text([{"role": "user", "content": text}], "a prompt", add_generation_prompt=True)

    def end_of_turn(self) -> str:
        """What the template writes after an answer; nothing where it refuses one."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            return self._text(talk, "an answer").rpartition(_ANSWER)[2].strip()
        except InputError:
            return ""

    def _text(self, messages: list[dict[str, Any]], where: str, tools: list[Any] | None = None,
              **options: bool) -> str:
        import jinja2

        options = {"add_generation_prompt": False} | options
        try:
            return self._compiled.render(messages=messages, tools=tools, documents=None, **self.tokens,
                                         **options)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise BadRow(where, f"{self.path} refuses the messages", f": {error}") from None


def templates(data: DataConfig) -> dict[str, Path]:
    """The files of a chat template: the name that each has beside a tokenizer.json -> where it is."""
    found = {}
    if data.tokenizer != "bpe":
        home = tokenizer_file(data.tokenizer).parent
        found = {name: home / name for name in (BESIDE, CONFIG) if (home / name).is_file()}
    if data.chat_template is not None:
        found[BESIDE] = Path(data.chat_template).expanduser()
    return found


def _found(data: DataConfig, folder: Path | None, config: dict[str, Any]) -> tuple[Path, str]:
    """Where the template is, and its text."""
    if data.chat_template is not None:
        return (path := Path(data.chat_template).expanduser()), _read(path)
    if folder is not None and (folder / BESIDE).is_file():
        return folder / BESIDE, _read(folder / BESIDE)
    given = config.get("chat_template")
    if isinstance(given, list):  # several, by name
        given = next((each.get("template") for each in given if each.get("name") == "default"), None)
    if folder is not None and isinstance(given, str):
        return folder / CONFIG, given
    places = f"{folder} has neither {BESIDE} nor a chat_template in {CONFIG}" if folder is not None \
        else "data.tokenizer=bpe brings none"
    raise InputError(f"data.loss_mask=chat needs a chat template, and {places}; give the tokenizer.json of a "
                     "chat model, or a Jinja file in data.chat_template")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read as text: {reason}; give a Jinja file in "
                         "data.chat_template") from None

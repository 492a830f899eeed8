"""Chat: messages to text by a tokenizer's chat template, and which of the text the assistant says.

A template may mark what the assistant says ({% generation %}). Of others the text of the assistant's turn is
what the template adds to the messages before it, written as the beginning of an answer
(add_generation_prompt). So what is learned is what a model is asked for when it answers, with the token that
ends the turn. White space after that is not counted.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threed.base.errors import InputError
from threed.data.corpus import Segments, TextSegment
from threed.data.files import LeftOut
from threed.data.messages import ANSWERS, BEGIN, END, FLAGS, TOOLS, Message, counts
from threed.data.rows import BadRow
from threed.data.tokenizer_files import CONFIG, read_object, special_tokens, tokenizer_file
from threed.schema import DataConfig

if TYPE_CHECKING:
    from threed.data.jinja import Compiled

BESIDE = "chat_template.jinja"  # beside tokenizer.json, or in the field chat_template of:
_ANSWER = "threed"  # that no template writes by itself
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names of templates, where a tokenizer has several
_MORE = "additional_chat_templates"  # the folder of others beside it
_LINKS = ("role", "content", "tool_call_id", "id")  # of a message: its text, and what joins it to others
_CALLS = "tool_calls"
_ASKS = {"system", "developer", "user", "tool", "function", "ipython", "documents"}  # roles
_ENOUGH = 1000  # conversations that a template writes whole, after which no more are compared


class ChatTemplate:
    """A chat template as Hugging Face tokenizers have it: Jinja, with the same settings and functions."""

    def __init__(self, data: DataConfig):
        """InputError where there is no template, or it is not one."""
        folder = None if data.tokenizer == "bpe" else tokenizer_file(data.tokenizer).parent
        self.path, self.texts = _found(data, folder)
        self.tokens = special_tokens(folder) if folder is not None else {}
        self.unwritten = LeftOut()  # what conversations have and the template does not write
        self.not_counted = LeftOut()  # messages that ask to count, and do not
        self._whole = 0  # conversations of which it writes all
        assert self._compiled

    @property
    def identity(self) -> str:
        """All that decides which text messages become."""
        return repr((sorted(self.texts.items()), sorted(self.tokens.items())))

    @cached_property
    def _compiled(self) -> dict[str, Compiled]:
        import jinja2

        from threed.data.jinja import compiled

        try:
            return {name: compiled(text) for name, text in self.texts.items()}
        except jinja2.TemplateError as error:
            raise InputError(f"{self.path} is not a chat template: {error}") from None

    def _template(self, tools: list[Any] | None) -> Compiled:
        return self._compiled[_WITH_TOOLS if tools and _WITH_TOOLS in self.texts else _DEFAULT]

    def render(self, messages: list[Message], tools: list[Any] | None, where: str) -> Segments:
        """The segments of a conversation. BadRow where the template refuses it, or does not say what is an
        answer."""
        wanted = [counts(message, where) for message in messages]
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        for message, counted in zip(messages, wanted, strict=True):
            if counted and message["role"] != ANSWERS:
                self.not_counted.add(f"of role '{message['role']}'", where)
        if not answers:
            if others := {message["role"] for message in messages} - _ASKS:
                raise BadRow(where, f"no message has role '{ANSWERS}', the one that counts",
                             f" (roles that are not known: {', '.join(sorted(others))}); rename it")
            return []
        messages = messages[:answers[-1] + 1]  # nothing after them counts
        split = self._by_marks if self._template(tools).marks else self._by_turns
        segments = split(messages, tools, where, [n for n in answers if wanted[n] is False])
        self._compare(messages, tools, where, "".join(segment.text for segment in segments))
        return [segment for segment in segments if segment.text]

    def _by_turns(self, messages: list[Message], tools: list[Any] | None, where: str,
                  out: list[int]) -> Segments:
        """`out`: the answers that do not count."""
        segments: Segments = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            prompt = self._text(messages[:number], where, tools, add_generation_prompt=True)
            answered = self._text(messages[:number + 1], where, tools)
            if not (prompt.startswith(done) and answered.startswith(prompt)):
                raise BadRow(where, f"{self.path} writes the messages before an answer otherwise once it "
                             "follows", f", here before message {number}, so what the assistant says cannot "
                             "be told; give another data.chat_template, or one turn a conversation")
            answer = answered[len(prompt):]
            said = answer.rstrip()
            segments += [TextSegment(prompt[len(done):], False), TextSegment(said, number not in out),
                         TextSegment(answer[len(said):], False)]
            done = answered
        return segments

    def _by_marks(self, messages: list[Message], tools: list[Any] | None, where: str,
                  out: list[int]) -> Segments:
        """`out`: the answers that do not count."""
        first, *marked = self._marked(messages, where, tools).split(BEGIN)
        if not marked:
            raise BadRow(where, f"{self.path} marks nothing of these messages by {{% generation %}}", ", so "
                         "what the assistant says cannot be told; give another data.chat_template")
        segments, not_counted = [TextSegment(first, False)], set()
        if out:  # the marks of an answer are those that come with it
            answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
            stops = [0, *(self._marked(messages[:number + 1], where, tools).count(BEGIN)
                          for number in answers)]
            if any(start >= stop for start, stop in pairwise(stops)):
                raise BadRow(where, f"{self.path} does not mark each answer by {{% generation %}}", ", so it "
                             f"cannot be told what message {out[0]}, which is not to count, is")
            not_counted = {mark for number, edges in zip(answers, pairwise(stops), strict=True)
                           if number in out for mark in range(*edges)}
        for number, part in enumerate(marked):
            said, end, rest = part.partition(END)
            if not end or END in rest:
                raise BadRow(where, f"{self.path} has one {{% generation %}} in another, or the text has "
                             "U+FDD0 or U+FDD1", ", so what the assistant says cannot be told")
            segments += [TextSegment(said, number not in not_counted), TextSegment(rest, False)]
        return segments

    def _compare(self, messages: list[Message], tools: list[Any] | None, where: str, whole: str) -> None:
        """Note what messages have and the template does not write: the text `whole` is the same without it.
        BadRow where nothing of an answer is left."""
        lost, at, said = [], 0, False
        for number, message in enumerate(messages):
            place = whole.find(message["content"].strip(), at)
            at = max(at, place)
            if place < 0 and self._same(messages, number, {**message, "content": _ANSWER}, tools, whole):
                lost.append(f"of role '{message['role']}'")
            else:
                said |= message["role"] == ANSWERS
        if not said:
            raise BadRow(where, f"{self.path} writes nothing of what the assistant says", "; give another "
                         "data.chat_template")
        looked = [(number, name) for number, message in enumerate(messages) for name in message
                  if name not in (*_LINKS, *FLAGS) and message[name] not in ("", [], {})]
        if (looked or tools) and self._whole < _ENOUGH:
            for number, name in looked:
                message = messages[number]
                rest = {key: value for key, value in message.items() if key != name}
                if self._same(messages, number, rest, tools, whole):
                    if name == _CALLS and message["role"] == ANSWERS and not message["content"].strip():
                        raise BadRow(where, f"a message that holds '{_CALLS}' alone, which {self.path} does "
                                     "not write", f": message {number}; give a data.chat_template that does")
                    lost.append(f"'{name}' in role '{message['role']}'")
            if tools and self._same(messages, 0, messages[0], None, whole):
                lost.append(f"'{TOOLS}' beside them")
            self._whole += not lost
        for each in lost:
            self.unwritten.add(each, where)

    def _same(self, messages: list[Message], number: int, other: Message, tools: list[Any] | None,
              whole: str) -> bool:
        """Whether the text is the same with another message in a place."""
        try:
            return self._text([*messages[:number], other, *messages[number + 1:]], "", tools) == whole
        except BadRow:
            return False

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

    def _text(self, messages: list[Message], where: str, tools: list[Any] | None = None,
              **options: bool) -> str:
        text = self._marked(messages, where, tools, **options)
        return text.replace(BEGIN, "").replace(END, "") if self._template(tools).marks else text

    def _marked(self, messages: list[Message], where: str, tools: list[Any] | None = None,
                **options: bool) -> str:
        """A text in which what the assistant says is marked, if the template marks it."""
        options = {"add_generation_prompt": False} | options
        try:
            return self._template(tools).render(messages=messages, tools=tools, documents=None, **self.tokens,
                                                **options)
        except Exception as error:  # the expressions of a template raise what they like
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


def _found(data: DataConfig, folder: Path | None) -> tuple[Path, dict[str, str]]:
    """Where the templates are, and the text of each by its name."""
    if data.chat_template is not None:
        path = Path(data.chat_template).expanduser()
        if (text := _read(path)).lstrip().startswith('{"'):
            raise InputError(f"{path} is JSON, and no Jinja file; give data.chat_template a file that holds "
                             "the text of its field chat_template")
        return path, {_DEFAULT: text}
    if folder is not None and (folder / BESIDE).is_file():
        more = {path.stem: _read(path) for path in folder.glob(f"{_MORE}/*.jinja")}
        return folder / BESIDE, {**more, _DEFAULT: _read(folder / BESIDE)}
    given = read_object(folder / CONFIG).get("chat_template") if folder is not None else None
    named = {each.get("name"): each.get("template") for each in given} if isinstance(given, list) else \
        {_DEFAULT: given}
    if folder is not None and isinstance(named.get(_DEFAULT), str):
        return folder / CONFIG, {name: text for name, text in named.items() if isinstance(text, str)}
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

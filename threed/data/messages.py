"""Messages: the conversation in a row, which of its messages are not to count, and what else a row says that
threed does not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from threed.data.files import held_out
from threed.data.rows import BadRow, Row, checked_text, name_of

ANSWERS = "assistant"  # the role whose messages count
TOOLS = "tools"  # the field beside the messages that describes what may be called
# Fields of a message that say whether it counts: of OpenAI and mistral-finetune, of axolotl, of ms-swift and
# XTuner; and those that say the opposite, as torchtune's.
_COUNTS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "step_loss_mask")
_COUNTS_NOT = ("masked", "mask", "ignore")
FLAGS = (*_COUNTS, *_COUNTS_NOT)
# Fields beside the messages of which other programs make a part of the text.
NOT_READ = ("system", "functions", "documents", "images", "videos", "audios", "chat_template_kwargs")
SPLITS = ("split", "set", "partition", "fold")  # fields of a row that may name its split
UNWANTED = "label"  # false in rows of a text that is not wanted (KTO)

# Before and after what a template marks as said by the assistant: two code points that are no characters, for
# such internal use.
BEGIN, END = "\ufdd0", "\ufdd1"

Message = dict[str, Any]


def messages_of(row: Row, field: str, where: str) -> list[Message]:
    """The messages of a row, without fields that are null. BadRow where they are none."""
    key, what, messages = "data.messages_key", f"field '{field}'", row.get(field)
    lists = [name for name, other in row.items() if other and isinstance(other, list)
             and isinstance(other[0], dict) and name != TOOLS]
    if field not in row:
        raise BadRow(where, f"no {what}", f" (the fields are: {', '.join(row) or 'none'})", key, lists)
    if not isinstance(messages, list):
        raise BadRow(where, f"{what} is {name_of(messages)}, not a list of messages", "", key, lists)
    if not messages:
        raise BadRow(where, f"{what} is a list without messages")
    return [_message(each, number, what, where) for number, each in enumerate(messages)]


def _message(given: Any, number: int, field: str, where: str) -> Message:
    if not isinstance(given, dict) or "role" not in given:
        there = f"the fields are: {', '.join(given)}" if isinstance(given, dict) else \
            f"it is {name_of(given)}"
        raise BadRow(where, f"a message of {field} must be an object with role and content",
                     f": message {number} is not ({there})")
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("tool_calls"):
        message.setdefault("content", "")  # it calls instead
    for name in ("role", "content"):
        try:
            checked_text(message.get(name), f"{name} of a message of {field}", where)
        except BadRow as error:
            raise BadRow(where, error.reason, f": message {number}") from None
    return message


def tools_of(row: Row, where: str) -> list[Any] | None:
    """What the messages may call: a list, or a text of JSON that holds one."""
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except ValueError:
            raise BadRow(where, f"field '{TOOLS}' is a text, and no JSON") from None
    if tools is not None and not isinstance(tools, list):
        raise BadRow(where, f"field '{TOOLS}' is {name_of(tools)}, not a list")
    return tools or None


def counts(message: Message, where: str) -> bool | None:
    """What a message says about whether it counts; None: nothing. BadRow where it is neither yes nor no."""
    said = None
    for name in FLAGS:
        if name not in message:
            continue
        if message[name] not in (0, 1):  # true and false, too
            raise BadRow(where, f"'{name}' of a message is neither 0 nor 1",
                         f", but {json.dumps(message[name], default=str)[:40]}: it counts, or does not")
        said = bool(message[name]) == (name in _COUNTS) and said is not False
    return said


def without_effect(row: Row, names: Sequence[str]) -> Iterator[str]:
    """What the fields `names` of a row say that threed does not heed, in words that such rows share."""
    for name in names:
        value = row.get(name)
        if name in SPLITS and isinstance(value, str) and held_out([value]):
            yield f"of split '{value}' by a field of the row, trained on"
        elif name == UNWANTED and value is False:
            yield f"with '{name}': false, as texts that are not wanted have it, counted in full"
        elif name in FLAGS and value is not None and value != (name in _COUNTS):
            yield f"with '{name}' beside the text, counted in full"
        elif name in NOT_READ and value:
            yield f"with '{name}' beside the messages, read without it"

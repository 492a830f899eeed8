"""Whether the keys of the data suit each other. No torch."""

from __future__ import annotations

from threed.base.errors import InputError
from threed.base.quantity import parse_weighted
from threed.schema import Config, DataConfig


def check_data(config: Config) -> list[str]:
    """Keys of the data that have no effect, or do not go together."""
    data, problems = config.data, []
    for key, wanted in (("prompt_key", "answers"), ("answer_key", "answers"), ("messages_key", "chat"),
                        ("chat_template", "chat")):
        value = getattr(data, key)
        if value != getattr(DataConfig(), key) and data.loss_mask != wanted:
            problems.append(f"data.{key}={value} needs data.loss_mask={wanted}, and it is {data.loss_mask}; "
                            "leave it out")
    if data.bad_rows_limit != DataConfig().bad_rows_limit and data.on_bad_row != "skip":
        problems.append(f"data.bad_rows_limit={data.bad_rows_limit} needs data.on_bad_row=skip, and it is "
                        f"{data.on_bad_row}; leave it out")
    for index, entry in enumerate(data.mix or []):
        try:
            parse_weighted(entry)
        except InputError as error:
            problems.append(f"data.mix[{index}]: {error}")
    if data.mix is not None and (not data.mix or data.source != DataConfig().source):
        problems.append(f"data.mix={list(data.mix)}, data.source={data.source}: one of them names the data")
    if data.prepend_bos and data.tokenizer == "bpe":
        problems.append("data.prepend_bos=true needs a tokenizer.json in data.tokenizer: bpe has no <s>")
    if data.loss_mask != "none" and data.text_key != DataConfig().text_key:
        where = "data.messages_key" if data.loss_mask == "chat" else "data.prompt_key and data.answer_key"
        problems.append(f"data.text_key={data.text_key} with data.loss_mask={data.loss_mask}: its texts are "
                        f"in {where}; leave it out")
    if config.run.cuda_graphs and data.document_mask:
        problems.append("run.cuda_graphs=true with data.document_mask=true: attention has the shapes of the "
                        "documents, and a CUDA graph has fixed ones; set one of the two to false")
    return problems

"""Whether the keys of the data, and of loggers, suit each other. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from threed.base.errors import Idle, InputError, Problem
from threed.base.quantity import parse_weighted
from threed.schema import Config, DataConfig


def check_data(config: Config) -> Iterator[Problem]:
    """Keys of the data that have no effect, or do not go together."""
    data = config.data
    for key, wanted in (("prompt_key", "answers"), ("answer_key", "answers"), ("messages_key", "chat"),
                        ("chat_template", "chat")):
        value = getattr(data, key)
        if value != getattr(DataConfig(), key) and data.loss_mask != wanted:
            yield Idle.of(f"data.{key}", f"={value} needs data.loss_mask={wanted}, and it is "
                          f"{data.loss_mask}; leave it out")
    if data.bad_rows_limit != DataConfig().bad_rows_limit and data.on_bad_row != "skip":
        yield Idle.of("data.bad_rows_limit", f"={data.bad_rows_limit} needs data.on_bad_row=skip, and it "
                      f"is {data.on_bad_row}; leave it out")
    sources = [data.source] if data.mix is None else []
    for index, entry in enumerate(data.mix or []):
        try:
            sources.append(parse_weighted(entry)[1])
        except InputError as error:
            yield Problem.of("data.mix", f"[{index}]: {error}")
    for key, place in (("run.dir", config.run.dir), ("data.cache", data.cache)):
        inside = [each for each in sources if place and _is_within(place, each)]
        if inside:
            where = "data.source" if data.mix is None else "data.mix"
            yield Problem.of(key, f"={place} is within {inside[0]}, all of whose files are data: the next "
                             "start would train on what this one writes; give another folder, or a glob in "
                             f"{where}, such as {inside[0]}/*.txt")
    if data.mix is not None and (not data.mix or data.source != DataConfig().source):
        yield Problem.of("data.mix", f"={list(data.mix)}, data.source={data.source}: one of them names the "
                         "data; leave the other out")
    if data.prepend_bos and data.tokenizer == "bpe":
        yield Problem.of("data.prepend_bos", "=true needs a tokenizer.json in data.tokenizer: bpe has no <s>")
    if data.loss_mask != "none" and data.text_key != DataConfig().text_key:
        where = "data.messages_key" if data.loss_mask == "chat" else "data.prompt_key and data.answer_key"
        yield Idle.of("data.text_key", f"={data.text_key} with data.loss_mask={data.loss_mask}: its texts "
                      f"are in {where}; leave it out")
    if config.run.cuda_graphs and data.document_mask:
        yield Problem.of("run.cuda_graphs", "=true with data.document_mask=true: attention has the shapes of "
                         "the documents, and a CUDA graph has fixed ones; set one of the two to false")


def _is_within(place: str, source: str) -> bool:
    """Whether a place is in a folder of data."""
    folder = Path(source)
    return folder.is_dir() and Path(place).expanduser().resolve().is_relative_to(folder.resolve())


def check_monitor(config: Config) -> Iterator[Problem]:
    """Problems of the prometheus logger: it needs a port or a file, and a port or a file needs it."""
    monitor = config.monitor
    port, file = monitor.prometheus_port, monitor.prometheus_file
    given = f"=[{','.join(map(str, monitor.loggers))}]"
    if "prometheus" in monitor.loggers and port is None and not file:
        yield Problem.of("monitor.loggers", f"{given}: give monitor.prometheus_port (such as 9400), where "
                         "prometheus reads the metrics, or monitor.prometheus_file, for node_exporter's "
                         "textfile collector")
    for key, value in (("prometheus_port", port), ("prometheus_file", file)):
        if "prometheus" not in monitor.loggers and value is not None:
            yield Idle.of(f"monitor.{key}", f"={value} has no effect: monitor.loggers{given} lacks "
                          "prometheus")

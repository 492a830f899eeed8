"""Export: a run's newest checkpoint, or a named one, becomes the folder of a model of transformers.

Names of files, their order of tensors and what is beside them are those of the import, where the run began
with one (RUN/huggingface). One parameter of ours is in memory at a time, in fp32; of experts, one expert.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from threed.base.errors import InputError
from threed.base.progress import Progress
from threed.base.quantity import show_bytes
from threed.data.chat import BESIDE, CONFIG, templates
from threed.data.prompts import encode
from threed.data.tokenizer import load
from threed.data.tokenizer_files import tokenizer_file
from threed.data.tokens import prepare
from threed.interop.hf import sidecar as kept
from threed.interop.hf.adapters import merge, without
from threed.interop.hf.config import written
from threed.interop.hf.fitting import family_for
from threed.interop.hf.importing import TIED
from threed.interop.hf.names import HFFamily, TensorRow
from threed.interop.hf.places import INDEX, read
from threed.interop.hf.source import Exported, Trained
from threed.interop.hf.stacked import unstack
from threed.interop.hf.tensors import NAMES, WORDS, FileWriter, entries_of, headers_of, index_text
from threed.models.model import parameters
from threed.schema import Config, ModelConfig
from threed.spec.parameter import Parameter

SHARD = 5 * 10**9  # bytes of a file, as transformers cuts


def export_model(run: Path, output: Path, dtype: str | None = None, like: Path | None = None,
                 say: Callable[[str], None] = lambda line: None) -> Exported:
    """Export the run whose run.dir is `run`, or the checkpoint in the folder `run`. `dtype`: fp32, bf16 or
    fp16 of all tensors but biases of routers, which are fp32; None: as imported, else the run's. `like`: the
    folder of a model whose config.json, layout and tokenizer are followed; None: what the import kept in
    RUN/huggingface."""
    if dtype is not None and dtype not in NAMES:
        raise InputError(f"--dtype {dtype}: give {', '.join(NAMES)}")
    with Trained(run, like) as trained:
        model, beside = without(trained.config.model), trained.kept
        described = read(beside / kept.CONFIG) if beside is not None else None
        family = family_for(model, described)
        if described is not None and described.get("model_type") != family.model_type:
            kind = described.get("model_type")
            raise InputError(f"{beside}: config.json is of a {kind}, which cannot hold this model; a "
                             f"{family.model_type} can: leave --like out, or remove {beside}")
        usual = trained.manifest.config.get("precision", {}).get("dtype", "")
        layout = _layout(family, model, kept.headers(beside), dtype, NAMES.get(usual, "F32"))
        with trained.written(output) as aside:
            say(f"{trained.path} as a {family.model_type}: {', '.join(layout.headers)}")
            asked = f"--dtype {dtype}" if dtype is not None else "no --dtype is given, but the import, or " \
                "precision.dtype, has 16 bits"
            notes = _write_weights(trained, family, FileWriter(aside, layout.headers, asked), layout, say)
            if (capacity := getattr(model, "moe_capacity", None)) is not None:
                notes.append(f"model.moe_capacity={capacity:g} dropped choices in training (moe/dropped); "
                             "transformers has no capacity and drops none, as threed's evaluation does")
            _write_rest(aside, replace(trained.config, model=model), layout, family, beside,
                        trained.home)
        return trained.exported(family.model_type, output, notes)


class ExportFiles(NamedTuple):
    """What the files of an export are."""

    headers: dict[str, str]  # file -> header
    cut: str  # begin of the names of their tensors that the files leave out
    copies: tuple[str, ...]  # tensors that are tied to the word embedding, and are in the files all the same
    fresh: bool  # whether it is another one than that of the import
    word: str | None  # the dtype that config.json says; None: what that of the import says


def _layout(family: HFFamily, model: ModelConfig, before: dict[str, str] | None, dtype: str | None,
            usual: str) -> ExportFiles:
    """The layout of the import, `before`, if that has the same tensors, of the same shapes and of `dtype`;
    else a new one, of `dtype`, or of that of the import, or `usual`. (Experts that were stacked are not.)
    Biases of routers are fp32 in it, as compute reads them here and in transformers."""
    rows, shapes, wide = family.rows(model), dict[str, tuple[int, ...]](), dict[str, str]()
    entries = {name: entry for file, header in (before or {}).items()
               for name, entry in entries_of(file, header).items()}
    cut = "" if any(name.startswith(family.prefix) for name in entries) else family.prefix
    stacked = []
    for parameter in parameters(model):
        mine = rows[parameter.name]
        stacked += unstack(entries, mine, parameter.stored, model, cut)[0]
        for row in mine:
            shapes |= row.shapes(parameter.stored, model)
            wide |= dict.fromkeys(row.theirs, "F32") if parameter.counted else {}
    kinds = {entry.dtype for name, entry in entries.items() if cut + name not in wide}
    word = None if dtype is None else WORDS[NAMES[dtype]]
    copies = tuple({TIED} & entries.keys()) if model.tie_embeddings else ()
    had = {name: entry.shape for name, entry in entries.items() if name not in copies}
    same = had == {name.removeprefix(cut): shape for name, shape in shapes.items()}
    if before is not None and same and not stacked and (dtype is None or all(
            entries[name.removeprefix(cut)].dtype == wide.get(name, NAMES[dtype]) for name in shapes)):
        return ExportFiles(before, cut, copies, False, word)
    if same and dtype is None:
        dtypes = {name: entries[name.removeprefix(cut)].dtype for name in shapes}
    else:
        chosen = NAMES[dtype] if dtype is not None else kinds.pop() if len(kinds) == 1 else usual
        dtypes, word = dict.fromkeys(shapes, chosen) | wide, WORDS[chosen]
    return ExportFiles(headers_of(shapes, dtypes, SHARD), "", (), True, word)


def _write_weights(trained: Trained, family: HFFamily, writer: FileWriter, layout: ExportFiles,
                   say: Callable[[str], None]) -> list[str]:
    """Write all parameters; lines to say."""
    model = without(trained.config.model)
    everything = list(parameters(model))
    progress = Progress("exported", 4 * sum(math.prod(each.stored) for each in everything), show_bytes, say)
    rows = family.rows(model)

    def write(parameter: Parameter, row: TensorRow) -> None:  # after which its values are gone
        values = trained.read(parameter, row.box(parameter.stored))
        merge(values, parameter.name, trained)
        parts = row.parts(values, model)
        for name, part in zip(row.theirs, parts, strict=True):
            writer.write(name.removeprefix(layout.cut), part)
        for name in layout.copies if parameter.tied else ():
            writer.write(name, parts[0])
        progress.add(values.nbytes)

    for parameter in everything:
        for row in rows[parameter.name]:
            write(parameter, row)
    return writer.close()


def _write_rest(aside: Path, config: Config, layout: ExportFiles, family: HFFamily, beside: Path | None,
                home: Path) -> None:
    """Everything but the weights. `home`: the folder of the run."""
    described = read(beside / kept.CONFIG) if beside is not None else None
    values = written(family, config.model, described, layout.word)
    if beside is not None:
        kept.give_back(beside, aside)
    if beside is not None and values == described:
        shutil.copyfile(beside / kept.CONFIG, aside / kept.CONFIG)
    else:
        (aside / kept.CONFIG).write_text(kept.text_of(values))
    if not layout.fresh and beside is not None and (beside / INDEX).is_file():
        shutil.copyfile(beside / INDEX, aside / INDEX)
    elif len(layout.headers) > 1:
        (aside / INDEX).write_text(index_text(layout.headers))
    if beside is None:
        ends = _tokenizer(aside, config, home)
        named = {"bos_token_id": ends[0], "eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
        (aside / kept.GENERATION).write_text(kept.text_of({"_from_model_config": True, **named}))
    elif config.data.chat_template is not None and (home / BESIDE).is_file():
        shutil.copyfile(home / BESIDE, aside / BESIDE)  # the run has learned another than the import had


def _tokenizer(aside: Path, config: Config, home: Path) -> list[int]:
    """Write the tokenizer of a run that began without an import, and its chat template; the tokens at which a
    text ends, the end-of-text token first."""
    data = config.data
    try:
        named = [] if data.tokenizer == "bpe" else [tokenizer_file(data.tokenizer)]
        file = next((each for each in (home / kept.TOKENIZER, *named) if each.is_file()), None)
        file = file or prepare(data, config.model).tokenizer
    except InputError:  # the data are not on this machine
        file = None
    if file is None or not file.is_file():
        return []
    tokenizer = load(file)
    shutil.copyfile(file, aside / kept.TOKENIZER)
    word = tokenizer.end
    words = {} if word is None else {"bos_token": word, "eos_token": word}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.model.seq_len,
                **words}
    known = replace(data, tokenizer=str(file))
    if file.parent == home and (home / BESIDE).is_file():
        known = replace(known, chat_template=None)
    for name, source in templates(known).items():
        if source.is_file() and name != CONFIG:
            shutil.copyfile(source, aside / name)
        elif source.is_file():
            settings |= read(source)
    (aside / CONFIG).write_text(kept.text_of(settings))
    try:
        return list(encode(tokenizer, [], known, config.model).ends)
    except InputError:  # its chat template is not on this machine
        return [] if tokenizer.eod is None else [tokenizer.eod]

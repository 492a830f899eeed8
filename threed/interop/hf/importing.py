"""Import: the weights of a model of transformers become a checkpoint at step 0, and its config a YAML.

The checkpoint has weights alone: a run that resumes from it begins with an optimizer's fresh state, on any
mesh. One parameter of ours is in memory at a time, in fp32; of experts, one expert.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from threed.base.axes import AXES
from threed.base.errors import InputError
from threed.base.files import sync
from threed.base.progress import Progress
from threed.base.quantity import show_bytes
from threed.checkpoint.choose import beyond
from threed.checkpoint.format import checkpoints, file_name, folder, is_name, name_of
from threed.checkpoint.lineage import Lineage, write_latest
from threed.checkpoint.manifest import FORMAT
from threed.checkpoint.save import describe
from threed.checkpoint.shard_file import Item, write
from threed.config import load as configs
from threed.data.run_tokenizer import tokenizer_digest
from threed.data.tokenizer import load
from threed.data.tokenizer_files import CONFIG
from threed.features.zero.boxes import Box
from threed.interop.hf import lacks, rotary
from threed.interop.hf import sidecar as kept
from threed.interop.hf.adapters import without
from threed.interop.hf.config import family_of, values_of
from threed.interop.hf.names import HFFamily, TensorRow
from threed.interop.hf.places import located, read, title_of, weight_map, whole_file
from threed.interop.hf.slices import TensorPart
from threed.interop.hf.stacked import unstack
from threed.interop.hf.tensors import DTYPES, NAMES, Files, Fit
from threed.models.model import parameters
from threed.schema import Config, ModelConfig
from threed.spec.parameter import Parameter

TIED = "lm_head.weight"  # in some files of tied models, too
_EMBEDDING = "embedding.word.weight"
_COMMENTS = {"optimizer":
             "For a model that is trained already; a new one takes about thirty times this rate. "
             "(LoRA takes about 2e-4.)"}


class Source(NamedTuple):
    """Where the tensors of a model are."""

    files: Files
    rows: dict[str, list[TensorRow]]  # our parameter -> its rows
    cut: str  # begin of the names of their tensors that the files leave out
    stacked: list[str]  # tensors that are listed by other names now: those of all experts of a block
    copies: tuple[str, ...]  # tensors that are tied to the word embedding, and are in the files all the same
    dropped: tuple[str, ...]  # tensors that are no weights


class Imported(NamedTuple):
    """What an import has written."""

    family: str
    checkpoint: Path
    config: Path
    parameters: int
    bytes: int  # of the checkpoint
    notes: list[str]


def import_model(source: Path, output: Path, overrides: list[str] | None = None,
                 yaml_file: Path | None = None,
                 say: Callable[[str], None] = lambda line: None) -> Imported:
    """Import the folder of a model of transformers, or the folder around it in the hub's cache. `output`: the
    run.dir of a run to come, or a checkpoint's folder, such as PATH/step-00000000. `yaml_file`: the config to
    write; None: config.yaml beside the checkpoints. InputError where the model is not one that threed has,
    and `overrides` do not say what it is to be instead."""
    source, notes = located(source)
    for note in notes:
        say(note)
    described = read(source / kept.CONFIG)
    family = family_of(described, source / kept.CONFIG)
    given = configs.overrides_of(overrides)
    checkpoint, home = _places(output)
    if given.get("run.dir", str(home)) != str(home):
        raise InputError(f"run.dir={given['run.dir']}: it is what -o says, {home}; leave it out")
    values, said = values_of(family, described, source / kept.CONFIG,
                             {key.removeprefix("model."): value for key, value in given.items()})
    beside = home / kept.FOLDER
    data, more = _tokenizer(source / kept.TOKENIZER, beside / kept.TOKENIZER)
    notes = [*said, *more]
    wide = described.get("dtype", described.get("torch_dtype"))
    values = {**{f"model.{key}": value for key, value in values.items() if value is not None}, **data,
              **({"precision.dtype": "bf16"} if wide == "bfloat16" else {}), "run.dir": str(home),
              "optimizer.lr": 2e-4 if given.get("model.lora_rank") else 1e-5, "optimizer.warmup_steps": 10,
              **given}
    config = configs.of_values(values, f"the config of {source}")
    config = replace(config, model=without(config.model))  # adapters begin anew in the run
    found = locate(family, config.model, Files(source))
    made_for = rotary.made_for(family, described, config.model)
    notes += beyond(made_for, config.model.seq_len)
    if found.dropped:
        notes.append(f"dropped, since they are no weights: {', '.join(found.dropped[:3])}"
                     f"{f' and {len(found.dropped) - 3} more' if len(found.dropped) > 3 else ''}")
    if stacked := [name for name in found.stacked if ".experts." in name]:
        notes.append(f"experts are stacked in the files, as in {stacked[0]}: an export writes tensors of "
                     "each expert, as transformers does")
    file = yaml_file or home / "config.yaml"
    _check_room(config, checkpoint, beside, file)
    say(f"{family.model_type}: {len(found.rows)} tensors, from {', '.join(found.files.headers)}")
    try:
        kept.keep(source, beside, None if found.dropped else found.files.headers)
        _write_yaml(file, values, source)
        known = {"made_for": made_for, "data": _identity(beside / kept.TOKENIZER)}
        size, strange = _write_checkpoint(checkpoint, config, found, known, say)
    except BaseException as error:  # Ctrl-C, too, leaves nothing half done
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # there may be no folder of it
            file.unlink()
        if isinstance(error, OSError):
            raise InputError(f"{home} cannot be written: {error.strerror or error}") from None
        raise
    return Imported(family.model_type, checkpoint, file, sum(each.numel for each in parameters(config.model)),
                    size, [*notes, *strange])


def _tokenizer(source: Path, kept_file: Path) -> tuple[dict[str, Any], list[str]]:
    """The keys of `data` that a tokenizer asks for, and lines to say."""
    if source.is_file():
        whole_file(source)
    else:
        return {}, [f"{source.parent} has no {source.name}: set data.tokenizer, without which "
                    "nothing is trained (transformers' AutoTokenizer writes one with save_pretrained)"]
    try:
        found = load(source)
    except InputError as error:
        return {"data.tokenizer": str(kept_file)}, [str(error)]
    notes = [] if found.eod is not None else [
        f"{source} has no token that ends a document, and the files beside it name none: set "
        f'data.append_eod=false, or write {{"eos_token": "THE_TOKEN"}} into {kept_file.parent}/{CONFIG}']
    return {"data.tokenizer": str(kept_file), **({"data.prepend_bos": True} if found.bos else {})}, notes


def _check_room(config: Config, checkpoint: Path, beside: Path, file: Path) -> None:
    """InputError where something would be overwritten."""
    home = beside.parent
    try:
        if checkpoint.parent == folder(config) and checkpoints(config):
            raise InputError(f"{home} has checkpoints already: give another folder with -o")
        there = next((path for path in (checkpoint, beside, file) if path.exists()), None)
    except OSError as error:
        raise InputError(f"{home} cannot be written: {error.strerror}") from None
    if there is not None:
        raise InputError(f"{there} is there already: give another {'--config' if there == file else '-o'}")


def _places(output: Path) -> tuple[Path, Path]:
    """(the checkpoint's folder, the folder beside which the rest is kept)."""
    if is_name(output.name):
        return output, output.parent
    return output / "checkpoints" / name_of(0), output


def locate(family: HFFamily, model: ModelConfig, files: Files) -> Source:
    """Find the tensors of all parameters. InputError where one is missing, is of another shape, or is left
    over."""
    entries = files.entries
    cut = "" if any(name.startswith(family.prefix) for name in entries) else family.prefix
    every, rows = family.rows(model), dict[str, list[TensorRow]]()
    problems, stacked, taken = list[str](), list[str](), set[str]()
    for parameter in parameters(model):
        mine = every.get(parameter.name)
        if mine is None:
            problems.append(f"a {family.model_type} of transformers has no {parameter.name}: leave out the "
                            "override that asks for it")
            continue
        rows[parameter.name] = mine
        replaced, asked = unstack(entries, mine, parameter.stored, model, cut)
        stacked += replaced
        problems += _unlike(parameter.name, asked, files)
        taken.update(asked)
    rest = entries.keys() - taken
    copies = rest & {TIED} if model.tie_embeddings else set()
    dropped = {name for name in rest if name.endswith(family.dropped)} if family.dropped else set()
    problems += [f"{name} has no place in a {family.model_type} of threed{lacks.of_tensor(name)}"
                 for name in sorted(rest - copies - dropped)]
    if problems:
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        lines = "".join(f"\n  - {problem}" for problem in problems[:5])
        raise InputError(f"{files.folder}: the tensors are not those of config.json:{lines}{more}")
    return Source(files, rows, cut, stacked, tuple(sorted(copies)), tuple(sorted(dropped)))


def _unlike(ours: str, asked: Mapping[str, tuple[int, ...]], files: Files) -> Iterator[str]:
    """Tensors of a parameter that are missing, or of another shape."""
    near = {files.entries[name].file for name in asked if name in files.entries}
    alone = near.pop() if len(near) == 1 else ""  # the file that has the others
    places = (weight_map(files.folder) or {}) if asked.keys() - files.entries.keys() else {}
    for name, shape in asked.items():
        entry = files.entries.get(name)
        if entry is None:
            # Without an index the file may be whole, and config.json that of another model.
            where = (f" in {places[name]}: fetch that file again" if name in places else
                     f" in {alone}: take it and config.json from one place" if alone else "")
            yield (f"{name} is missing{where}"
                   + "; if the head's matrix is the word embedding, give model.tie_embeddings=true"
                   * (name == TIED))
        elif entry.shape != shape:
            yield (f"{name} has the shape {list(entry.shape)}, not {list(shape)}"
                   + _answer(ours, entry.shape, shape))


def _answer(ours: str, has: tuple[int, ...], asked: tuple[int, ...]) -> str:
    """The key that answers a shape that is not that of config.json, or what has such a shape."""
    if ours == _EMBEDDING and has[1:] == asked[1:]:
        return f"; if it has {has[0]} tokens, give model.vocab={has[0]}"
    if ours == "embedding.position.weight" and has[1:] == asked[1:]:
        return f"; the learned positions are {has[0]}: give model.seq_len={has[0]}"
    if ours.endswith(".router.weight") and has[1:] == asked[1:]:
        return f"; if it has {has[0]} experts, give model.experts={has[0]}"
    if ours.endswith(("q_norm.weight", "k_norm.weight")) and has[0] > asked[0]:
        return ": threed has no norms of queries and keys over all heads, but of each head"
    return ""


def _identity(tokenizer: Path) -> dict[str, Any] | None:
    """What the manifest says of the data (data/identity): the tokenizer alone is known."""
    return {"sources": [], "tokenizer": tokenizer_digest(tokenizer)} if tokenizer.is_file() else None


def _write_checkpoint(path: Path, config: Config, source: Source, known: dict[str, Any],
                      say: Callable[[str], None]) -> tuple[int, list[str]]:
    """Write a checkpoint of weights alone; its bytes, and lines to say. What fails leaves no folder
    behind. `known`: more entries of the manifest."""
    fit = Fit(f"precision.dtype={config.precision.dtype}")
    everything = list(parameters(config.model))
    progress = Progress("imported", 4 * sum(math.prod(each.stored) for each in everything), show_bytes, say)
    aside = path.with_name(path.name + ".import.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        items = [_item(parameter, row, config, source, progress, fit)
                 for parameter in everything for row in source.rows[parameter.name]]
        report = write(aside / file_name(0), 0, items)
        fit.check()
        lineage = Lineage.new(config)
        describe(aside, {
            "format": FORMAT, "step": 0, "updates": 0, "samples": 0, "skipped": 0, "loss_scaler": {},
            "waiting": None, "wandb_id": None, "weights_only": True, "lineage": lineage, **known,
            "mesh": {**dict.fromkeys(AXES, 1), "order": list(AXES)}, "torch": torch.__version__,
            "config": config.to_dict()}, [report])
        sync(aside)
        os.replace(aside, path)
        sync(path.parent)
        if path.parent == folder(config):
            write_latest(config, path.name, lineage)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return report.size, fit.notes()


def _item(parameter: Parameter, row: TensorRow, config: Config, source: Source, progress: Progress,
          fit: Fit) -> Item:
    """A parameter, or an expert's part of it, to be written, which is read when its turn comes."""
    offset, shape = row.box(parameter.stored)
    box = Box(parameter.name, offset, shape, parameter.stored, 0, parameter.axes)
    names = [name.removeprefix(source.cut) for name in row.theirs]
    # of compute: a weight is rounded to it in each step; not a router's bias
    dtype = torch.float32 if parameter.counted else DTYPES[NAMES[config.precision.dtype]]

    def values() -> torch.Tensor:
        whole = torch.empty(shape)
        if parameter.unpadded is not None:
            whole[parameter.unpadded:] = 0.0
        parts: list[TensorPart] = row.parts(whole, config.model)
        for name, part in zip(names, parts, strict=True):
            source.files.read(name, part, fit, dtype)
        for name in source.copies if parameter.tied else ():
            if source.files.differs(name, parts[0]):
                raise InputError(f"{source.files.folder}: tie_word_embeddings is true, and {name} is not "
                                 f"{names[0]}; give model.tie_embeddings=false if they are two matrices")
        progress.add(whole.nbytes)
        return whole.view(-1)

    return Item("param", box, values)


def _write_yaml(file: Path, values: Mapping[str, Any], source: Path) -> None:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    order = ("model", "data", "precision")
    text = "\n".join((f"# {_COMMENTS[name]}\n" if name in _COMMENTS else "")
                     + yaml.safe_dump({name: sections[name]}, sort_keys=False)
                     for name in sorted(sections, key=lambda name: order.index(name) if name in order else 9))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# {title_of(source)}, imported from transformers.\n{text}")

"""Choose: the checkpoint that a run resumes from, by `train.resume`, and notes about it.

`auto` takes the newest checkpoint of the run's own lineage. Where a run resumed from an older checkpoint,
because that was named or newer ones were damaged, the newer checkpoints are not of its lineage. A checkpoint
in a store is fetched into run.dir first; so is the newest of checkpoint.copy_to where run.dir has none, as
after the loss of its disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from threed.base.address import is_store
from threed.base.errors import InputError, RunError
from threed.checkpoint import differences, provenance
from threed.checkpoint.copy import fetch
from threed.checkpoint.format import (
    INDEX,
    Manifest,
    Unusable,
    checkpoints,
    folder,
    is_name,
    step_of,
)
from threed.checkpoint.lineage import Lineage, owner, read_latest, write_latest
from threed.checkpoint.manifest import unseal
from threed.checkpoint.named import named
from threed.optim.registry import OPTIMIZERS, kept_by, turning
from threed.schema import Config, ModelConfig, keys_of

_OF_ADAPTERS = ("model.lora_rank", "model.lora_alpha", "model.lora_targets")

class Candidate(NamedTuple):
    """A checkpoint to try."""

    path: Path
    lineage: Lineage | None  # the lineage that goes on; None: a new one begins
    may_fall_back: bool  # whether the run may take another checkpoint if this one is damaged


def candidates(config: Config, say: Callable[[str], None]) -> Iterator[Candidate]:
    """Checkpoints to try, the best first. `say` gets a line for each fetch."""
    (newest, lineage), resume, place = read_latest(config), config.train.resume, config.checkpoint.copy_to
    if resume == "auto" and place is not None and lineage is None and not _complete(config):
        if (path := fetch(place, folder(config), say)) is not None:
            yield Candidate(path, None, may_fall_back=True)
    elif resume == "auto" or (lineage is not None and lineage.goes_on(config)):
        if lineage is None:
            yield from (Candidate(path, None, may_fall_back=True) for path in _complete(config))
        else:
            yield from (Candidate(path, lineage, may_fall_back=True)
                        for path in _of_lineage(config, newest, lineage))
    elif is_store(resume):
        if (path := fetch(resume, folder(config), say)) is None:
            raise InputError(f"train.resume={resume}: there is no complete checkpoint; give a folder of "
                             "copies, or one of them, such as s3://BUCKET/RUN/step-00000100")
        yield Candidate(path, None, may_fall_back=False)
    elif resume != "never":
        yield Candidate(named(config), None, may_fall_back=False)


def _of_lineage(config: Config, newest: str, lineage: Lineage) -> list[Path]:
    """The lineage's own checkpoints, the newest first; then the checkpoint in another folder from which it
    began, if `latest` still names that one as the `newest`; then its ancestors' checkpoints. A checkpoint
    whose lineage cannot be read has its place by its step."""
    paths = [path for path in _complete(config) if lineage.may_have(owner(path), step_of(path))]
    if is_name(newest) and folder(config) / newest not in paths:  # it has gone: reading it says so
        paths = sorted([*paths, folder(config) / newest], key=step_of, reverse=True)
    if not os.path.isabs(newest):
        return paths
    begun = lineage.ancestors[-1][1] if lineage.ancestors else -1
    own = [path for path in paths if step_of(path) > begun]
    return [*own, Path(newest), *paths[len(own):]]


def _complete(config: Config) -> list[Path]:
    try:
        return checkpoints(config)
    except OSError as error:
        raise RunError(f"{folder(config)} cannot be listed: {error.strerror}; start again when that is "
                       "mended, or begin anew with train.resume=never") from None


def begin_lineage(config: Config, path: Path | None, lineage: Lineage) -> None:
    """On rank 0, before the first step: write the lineage to `latest`, so that a restart does not take
    checkpoints of another lineage in this folder."""
    if read_latest(config)[1] == lineage:
        return
    own = path is not None and is_name(path.name) and path.parent == folder(config)
    name = "none" if path is None else path.name if own else str(path.resolve())
    try:
        write_latest(config, name, lineage)
    except OSError as error:
        raise RunError(f"run.dir={config.run.dir} cannot be written: {error}; no checkpoint could be "
                       f"saved") from None


def read_manifest(path: Path, config: Config, trains: bool = True,
                  data: dict[str, Any] | None = None) -> Manifest:
    """The manifest. Unusable where a file is missing; InputError where the config cannot go on from this
    checkpoint. `trains`: False where only its weights are wanted. `data`: the identity of the run's data."""
    manifest = unseal(path)
    _check_files(path, manifest)
    base = is_base(manifest, config)
    if base and manifest.step and path.parent == folder(config):
        raise InputError(f"model.lora_rank={config.model.lora_rank} in the run.dir of the run that trained "
                         "the base model: its checkpoints have higher steps; give another run.dir, and "
                         f"train.resume={path}")
    if manifest.waiting and trains and not base:
        raise InputError(f"checkpoint {path} holds gradients that its next step was to apply, a step late "
                         "(offload.delayed_update, which is gone: offload.overlap=next hides the host's step "
                         "and applies none late); resume from one that was saved before the first delayed "
                         "step or after the last, or start anew from its weights: threed export, then threed "
                         "import")
    mine, model = config.to_dict()["model"], manifest.config["model"]
    # keys that do not change what the weights mean; but adapters are weights
    free = {"name", *(key.removeprefix("model.") for key, spec in keys_of(type(config.model)).items()
                      if spec.free and key not in _OF_ADAPTERS),
            *({"seq_len"} if config.model.position == "rotary" else ()),
            *({"balance"} if "bias" not in (mine.get("balance"), model.get("balance")) else ())}
    # An older checkpoint does not name newer keys, whose defaults are what there was before.
    given = {**asdict(ModelConfig()), "family": mine["family"], **model}
    if given["lora_rank"] is not None and mine["lora_rank"] is None:
        raise InputError(f"checkpoint {path} has adapters of model.lora_rank={given['lora_rank']}: give the "
                         "keys model.lora_* of its run to go on, or merge them by threed export, then threed "
                         "import")
    if base:
        free |= {key.removeprefix("model.") for key in _OF_ADAPTERS}
    else:
        given, mine = ({**keys, **_adapters(keys)} for keys in (given, mine))
    different = [f"model.{key}={given.get(key)} there, {mine[key]} here" for key in mine
                 if key not in free and given.get(key) != mine[key]]
    if different:
        why = ("; the biases of model.balance=bias are weights of the model: with another balance, or "
               "without biases, it would choose other experts" if given.get("balance") != mine.get("balance")
               else "")
        if "seq_len" not in free and given["seq_len"] != mine["seq_len"]:
            why += ("; model.position=learned has a row of weights for each place, and none for "
                    "others: only with model.position=rotary does a run go on at another model.seq_len")
        raise InputError(f"checkpoint {path} is of another model: {'; '.join(different)}{why}; give the "
                         "model its sizes" + ("" if base else ", or a new run a run.dir of its own"))
    saved = {kind for entry in manifest.parameters.values() for kind in entry.sums}
    name, theirs = config.optimizer.name, manifest.config.get("optimizer", {}).get("name")
    if theirs in OPTIMIZERS and turning(theirs) is not None and turning(name) is None:
        saved = set[str]()  # what it has of them is of some parameters
    missing = [kind for kind in kept_by(name) if kind not in saved]
    if missing and not (base or manifest.weights_only) and theirs != name:
        raise InputError(f"checkpoint {path} was saved with optimizer.name={theirs}, and has no "
                         f"{' and '.join(missing)}, which {name} needs: go on with "
                         f"{theirs}, or begin anew with train.resume=never")
    window, length = (manifest.made_for or {}).get("window"), config.model.seq_len
    if window is not None and length > window:
        raise InputError(f"model.seq_len={length}: the layers of the imported model in {path} have a "
                         f"sliding_window={window}, and attention is whole in threed: the two are the same "
                         f"up to model.seq_len={window}")
    if trains and (base or manifest.weights_only):
        provenance.check_named(path, manifest, data or {}, config.data)
    if trains and not manifest.weights_only:
        provenance.check(path, manifest, data or {}, config, base)
    return manifest


def is_base(manifest: Manifest, config: Config) -> bool:
    """Whether a checkpoint has the weights beside which a config trains adapters, and no adapters."""
    return config.model.lora_rank is not None and manifest.config["model"].get("lora_rank") is None


def as_begun(manifest: Manifest, config: Config) -> Manifest:
    """The manifest of a checkpoint, as far as the config's run goes on with it: of a base model it takes the
    weights alone, and begins at step 0."""
    if not is_base(manifest, config):
        return manifest
    return replace(manifest, step=0, updates=0, samples=0, tokens=0, skipped=0, loss_scaler={}, waiting=None,
                   wandb_id=None, weights_only=True)


def _adapters(model: dict[str, Any]) -> dict[str, Any]:
    """What the keys of adapters mean, however they are written."""
    rank, alpha, targets = (model[f"lora_{key}"] for key in ("rank", "alpha", "targets"))
    return {"lora_alpha": rank if alpha is None else alpha,
            "lora_targets": sorted(("q_proj", "v_proj") if targets is None else targets)}


def _check_files(path: Path, manifest: Manifest) -> None:
    """Unusable where a file is missing, or the index has another size. (The size of another file is checked
    by the ranks that open it, read.py: there may be thousands, and rank 0 looks once at the folder.)"""
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    sizes[INDEX] = sum(entry.size for entry in manifest.parameters.values())
    try:
        listed = set(os.listdir(path)) - {INDEX}
    except OSError:
        listed = set()
    for name in sizes.keys() - listed:  # a network file system may list a file late
        try:
            actual = (path / name).stat().st_size
        except OSError as error:
            raise Unusable(path, f"is incomplete: {name} cannot be read ({error.strerror})") from None
        if actual != sizes[name]:
            raise Unusable(path, f"is damaged: {name} has {actual} bytes, not {sizes[name]}")


def begun(config: Config) -> list[str]:
    """A line for a run that begins without a checkpoint, and freezes what it has drawn."""
    rank = config.model.lora_rank
    return [] if rank is None else [
        f"model.lora_rank={rank} without a checkpoint: adapters are trained beside random weights; "
        "begin with threed import, or name the base model's checkpoint with train.resume=PATH"]


def notes(path: Path, manifest: Manifest, data: dict[str, Any], config: Config) -> list[str]:
    """A line for each thing that the resumed run does otherwise than the run that saved. `data`: the identity
    of its data."""
    if is_base(manifest, config):
        return [f"{path.name} has no adapters: they begin anew, at step 0, with a fresh optimizer and "
                "schedule, and its weights are frozen", *beyond(manifest.made_for, config.model.seq_len),
                *provenance.notes(path, manifest, data, config, base=True)]
    if manifest.weights_only:  # it comes from no run
        anew = (["data.tokenizer=bpe is trained on the source: its tokens mean nothing to these weights"]
                if config.data.tokenizer == "bpe" and data.get("tokenizer") else [])
        return [f"{path.name} has weights alone: the optimizer, its schedule and the data begin fresh, at "
                f"step {manifest.step + 1}", *beyond(manifest.made_for, config.model.seq_len), *anew,
                *(f"{other} than that of these weights, to which its tokens mean something else"
                  for other in provenance.changes(manifest, data, config.data, base=True))]
    return [*differences.notes(path, manifest, config), *beyond(manifest.made_for, config.model.seq_len),
            *provenance.notes(path, manifest, data, config)]


def beyond(made_for: dict[str, int | None] | None, length: int) -> list[str]:
    """A line where sequences are longer than those for which an imported model is made."""
    most = (made_for or {}).get("tokens")
    return [f"model.seq_len={length} is more than the {most} tokens for which the imported model is made: it "
            "has not seen later positions (threed import takes model.rope_theta and model.rope_scaling, by "
            "which it may learn them)"] if most is not None and length > most else []

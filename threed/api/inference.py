"""Inference: what a run has learned. Continue texts, and measure the loss on data, on any mesh.

Ranks that only run forward load the weights of a checkpoint, whatever mesh has saved it, and hold no
gradients and no optimizer state. By default one process does it. The model, the data and the precision are
those of the run; the mesh is asked for by overrides.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from threed.api.plans import check_process, own_signals
from threed.base.errors import InputError, check_type
from threed.base.signals import calm
from threed.checkpoint.format import MANIFEST, checkpoints, folder, is_name, name_of
from threed.checkpoint.lineage import newest
from threed.checkpoint.manifest import unseal
from threed.comm.environment import place_of_environment
from threed.config.load import checked, of_values, overrides_of
from threed.config.values import get
from threed.data.chat import templates
from threed.data.run_tokenizer import kept_for
from threed.data.sampling import IMPORTED, TOKENIZER, Sampling
from threed.data.tokenizer_files import tokenizer_file
from threed.monitor.folders import as_run
from threed.schema import Config, DataConfig, RunConfig

# What overrides may change (`eval`: data, too). The rest is of the run, or has no effect without training.
MESH = ("parallel", "zero")
MACHINE = ("run.device", "run.timeout_s", "run.attention_backend", "run.deterministic")
FREE_KEYS = ("train.micro_batch_size", "precision.dtype", *MACHINE)


# ---------------------------------------------------------------- the verbs


def generate(run: str | Path, prompts: Sequence[str] = (), sampling: Sampling | None = None,
             checkpoint: int | str | Path | None = None, tokenizer: str | Path | None = None,
             overrides: list[str] | None = None, chat: bool | None = None) -> dict[str, Any]:
    """Continue texts with the weights of a run, as `threed generate` does.

    `run`: the folder of a run, or of one of its checkpoints. `prompts`: by default `train.sample_prompts` of
    the run. `checkpoint`: a step, or a folder; by default the newest. `tokenizer`: a tokenizer.json, by
    default that of the run's data. `overrides`: a mesh, such as `parallel.tp=2`. `chat`: whether a prompt is
    what a user says, written by the tokenizer's chat template; by default where the run's data are
    conversations. Starts processes, as `threed.train`. Returns the document of `threed generate --json`:
    `checkpoint`, `step`, `chat`, and `samples`, each with `prompt`, `text` (what was added), `tokens` (their
    ids), and whether it `ended` by itself. Raises InputError where something does not fit, RunError where the
    ranks have failed, and have said why.

    >>> threed.generate("runs/toy", ["import "])["samples"][0]["text"]
    """
    _here_alone()
    how = sampling or Sampling()
    how.check()
    check_type("prompts", prompts, (list, tuple), 'a list of texts, such as ["import "]')
    path, config, checkpoint = _opened(run, checkpoint)
    prompts = list(prompts) or config.train.sample_prompts
    if not prompts:
        raise InputError("no prompt: give --prompt TEXT, or more than one; the run has no "
                         "train.sample_prompts")
    config.data = _prompted(_kept(path, config, checkpoint), config.data, tokenizer, chat)
    own = forward_config(config, path, checkpoint, overrides)
    own.train.sample_prompts = prompts
    per_batch = own.train.micro_batch_size * own.dp
    own.train.global_batch_size = per_batch * -(-len(prompts) // per_batch)
    from threed.api import forward

    with own_signals():
        return {"run": str(run), **forward.texts(checked(own), how)}


def evaluate(run: str | Path, data: str | None = None, limit: int | None = None,
             checkpoint: int | str | Path | None = None, tokenizer: str | Path | None = None,
             overrides: list[str] | None = None) -> dict[str, Any]:
    """The loss of a run's weights on data, as `threed eval` measures it.

    `data`: a source as of `data.source`, of which all is measured; by default what the run has held out
    (data.validation_fraction). `limit`: most sequences. The others as of `generate`. Returns the document of
    `threed eval --json`: `checkpoint`, `step`, `data`, `loss` (the mean over `tokens`, those that count),
    `perplexity` (exp(loss); None above 1e304), `sequences` of model.seq_len tokens each, and `left_out`:
    sequences that do not fill a micro-batch on every rank. Errors as of `generate`.

    >>> threed.evaluate("runs/toy", "more/*.py")["perplexity"]
    """
    _here_alone()
    check_type("limit", limit, (int, None), "the most sequences")
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: give at least 1 sequence, or None for all")
    path, config, checkpoint = _opened(run, checkpoint)
    if data is None and not config.data.validation_fraction:
        raise InputError(f"{run} has held no data out (data.validation_fraction=0): give --data SOURCE")
    if data is not None:
        config.data.source, config.data.mix = data, None
        config.data.tokenizer = str(_tokenizers(_kept(path, config, checkpoint), config.data, tokenizer)[0])
    elif tokenizer is not None:
        raise InputError("a tokenizer is for other data: give --data SOURCE, too")
    own = forward_config(config, path, checkpoint, overrides, (*MESH, "data"))
    from threed.api import forward

    with own_signals():
        measured = forward.loss(own, data is not None, limit)
    mean = measured["loss"]
    return {"run": str(run), **measured, "data": own.data.source,
            "perplexity": math.exp(mean) if mean < 700 else None}


# ---------------------------------------------------------------- the config


def _opened(run: str | Path, checkpoint: int | str | Path | None) -> tuple[Path, Config, str]:
    """The folder of a run, its config, and the value of train.resume for a checkpoint. InputError where there
    is none."""
    check_type("run", run, (str, Path), "the folder that run.dir named")
    check_type("checkpoint", checkpoint, (int, str, Path, None), "a step, or the folder of a checkpoint")
    path = Path(run)
    if (path / MANIFEST).is_file():  # a checkpoint itself
        if checkpoint is not None:
            raise InputError(f"{run} is a checkpoint already: leave --checkpoint {checkpoint} out")
        config = of_values(unseal(path).config, f"{path / MANIFEST}")
        inside = is_name(path.name) and path.parent.name == "checkpoints"
        return path.resolve().parents[1] if inside else path, config, str(path)
    config = _of_folder(as_run(path))
    if config.model.own_layers:
        raise InputError(f"the layers of {run} are torch modules of your own, with which threed can "
                         "neither write text nor read it: see val/loss (train.eval_every)")
    config.run.dir = str(path)  # the folder may have been moved
    if checkpoint is None:
        if not checkpoints(config):
            raise InputError(f"{folder(config)} has no complete checkpoint: the run has saved none yet "
                             "(checkpoint.every)")
        return path, config, "auto"
    if (step := str(checkpoint)).isdecimal():
        checkpoint = folder(config) / name_of(int(step))
    if not Path(str(checkpoint)).is_dir():
        raise InputError(f"--checkpoint: there is no {checkpoint}; give a step, such as 100, or a folder")
    return path, config, str(checkpoint)


def _of_folder(path: Path) -> Config:
    """The config with which a run was last started; of an import that has not trained, its checkpoint's."""
    from threed.planner.from_config import CONFIG, load_config

    found = checkpoints(Config(run=RunConfig(dir=str(path))))
    if (path / CONFIG).is_file() or not found:
        return load_config(path)
    return of_values(unseal(found[0]).config, f"{found[0] / MANIFEST}")


def forward_config(config: Config, run: Path, checkpoint: str, overrides: Sequence[str] | None,
                   sections: Sequence[str] = MESH) -> Config:
    """The config of ranks that run the model of `config` forward: one process without ZeRO, unless
    `overrides` ask for more. InputError for an override that is not of these sections, and would have no
    effect."""
    given = overrides_of(overrides)
    if strange := [key for key in given if key.split(".")[0] not in sections and key not in FREE_KEYS]:
        raise InputError(f"{strange[0]}: the run has it already, or it is for training; overrides are of "
                         f"{', '.join(f'{name}.*' for name in sections)}, {', '.join(FREE_KEYS)}")
    values = config.to_dict()
    dtype = given.get("precision.dtype", values["precision"]["dtype"])
    micro, dp = given.get("train.micro_batch_size", 1), given.get("parallel.dp", 1)
    keys = [*(f"{section}.{key}" for section in ("model", "data") for key in values[section]), *MACHINE,
            "parallel.layers_per_unit"]
    same = {key: get(config, key) for key in keys}
    return of_values({
        **same, "run.dir": str(run), "precision.dtype": dtype,
        **({"precision.master": "none", "precision.loss_scale": 1.0} if dtype != "fp32" else {}),
        "parallel.dp": 1, "zero.stage": 0, "optimizer.name": "sgd",  # which keeps nothing
        "train.seed": config.train.seed, "train.resume": checkpoint, "monitor.wandb": "disabled",
        "train.global_batch_size": micro * dp if isinstance(micro, int) and isinstance(dp, int) else 1,
        "checkpoint.background": False, **given}, "the overrides")


def _kept(run: Path, config: Config, checkpoint: str) -> list[Path]:
    """Where the tokenizer of a checkpoint may be kept with its run."""
    path = newest(folder(config)) if checkpoint == "auto" else Path(checkpoint)
    home = run
    with contextlib.suppress(InputError):  # whoever loads the checkpoint says what is wrong with it
        home = kept_for(run, unseal(path).tokenizer) if path is not None else run
    return [home / TOKENIZER, run / IMPORTED / TOKENIZER]


def _tokenizers(places: list[Path], data: DataConfig, given: str | Path | None) -> list[Path]:
    """Files of the tokenizer of a run's data, what is kept with the run (`places`) first. InputError where
    there is none."""
    places = list(places)
    if data.tokenizer != "bpe":
        places.append(tokenizer_file(data.tokenizer))
    files = [tokenizer_file(given)] if given is not None else [place for place in places if place.is_file()]
    if not files or not files[0].is_file():
        why = "" if files else ": the run's data have no tokenizer, or an older version ran it"
        raise InputError(f"{[*files, *places][0]}: there is no tokenizer{why}; give --tokenizer FILE, a "
                         "tokenizer.json")
    return files


def _prompted(places: list[Path], data: DataConfig, tokenizer: str | Path | None,
              chat: bool | None) -> DataConfig:
    """The data section with which prompts are encoded: that of the run, with the tokenizer file and, if
    `chat` differs from it, with another loss mask. `places`: as in `_tokenizers`."""
    files = _tokenizers(places, data, tokenizer)
    if chat is None or chat == (data.loss_mask == "chat"):
        chat, mine = data.loss_mask == "chat", data
    else:  # what is said of examples has no effect
        usual = {key: getattr(DataConfig(), key) for key in ("text_key", "prompt_key", "answer_key",
                                                             "messages_key", "chat_template")}
        mine = replace(data, loss_mask="chat" if chat else "none", **usual)
    found = [replace(mine, tokenizer=str(file), chat_template=None) for file in files]
    if mine.chat_template is not None and not templates(found[0]):
        return replace(mine, tokenizer=str(files[0]))
    return next((each for each in found if templates(each)), found[0])


def _here_alone() -> None:
    """InputError where this process cannot start all ranks."""
    calm()
    if place_of_environment() is not None:
        raise InputError("generate and eval start all their ranks on this machine themselves: run them "
                         "without torchrun, srun and NNODES")
    check_process(forks=True)

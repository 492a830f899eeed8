"""The folder of a model: where it is when a folder around it is named, which of its files have the weights,
and what a folder is that has no model. No torch.

    hub/models--me--tiny/refs/main                 the name of a snapshot
                         snapshots/3f1c.../        the folder of a model: links into
                         blobs/                    the files
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.data.file_types import kind_of
from threed.data.tokenizer_files import snapshot

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/"
_KIND = {"models": "a model", "datasets": "a data set", "spaces": "a space"}
_HUB = re.compile(rf"({'|'.join(_KIND)})--(.+)")
_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # of a model at the hub
_ADDRESS = re.compile(r"^(https?:/+)?(www\.)?(huggingface\.co|hf\.co)/|^hf:/+|/tree/main/?$|@main$")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_GIVE = ("give the folder of a model of transformers, with config.json and *.safetensors (threed downloads "
         "nothing: hf download NAME --local-dir FOLDER fills one)")
# Files by which a folder without config.json is known, the surest first -> what it is, and what to do.
_STRANGERS = {
    "manifest.json": "is a checkpoint of threed: train from it with train.resume, or export it",
    "*.gguf": "has weights for llama.cpp (GGUF), mostly quantized: fetch the model that they were made from, "
              "in safetensors",
    "model_index.json": "is a pipeline of diffusers, not a language model",
    "consolidated*": "has weights in the layout of their makers, not of transformers: fetch the repository "
                     "that has config.json and model*.safetensors, or convert them with transformers",
    "latest_checkpointed_iteration.txt": "is a checkpoint of Megatron-LM: convert it to a model of "
                                         "transformers with Megatron's or Megatron Bridge's tools",
    "zero_to_fp32.py": "is a checkpoint of DeepSpeed: gather its weights with zero_to_fp32.py, and save the "
                       "model with save_pretrained of transformers",
    ".metadata": "is a distributed checkpoint of torch: gather it in the framework that wrote it, and save "
                 "the model with save_pretrained of transformers",
}
_OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx")


def located(named: Path) -> tuple[Path, list[str]]:
    """The folder of a model, where `named` is it, or the folder around its snapshots in the hub's cache; and
    lines to say. InputError, which says what `named` is, where it is neither."""
    named = named.expanduser()
    if not named.is_dir():
        raise InputError(_no_folder(named))
    folder, notes = named, []
    whole = Path(os.path.abspath(named))
    root = whole.parent if whole.name in ("snapshots", "refs", "blobs") else whole
    if match := _HUB.fullmatch(root.name):
        if match[1] != "models":
            raise InputError(f"{named} is {_KIND[match[1]]} in the hub's cache, not a model; {_GIVE}")
        if (folder := snapshot(root)) == root:
            raise InputError(f"{named} is the hub's cache of {title_of(root)}, and has no snapshot: the "
                             f"download did not end; {_again(root)}")
        notes = [f"{named} is the hub's cache of {title_of(root)}: its snapshot {folder.name} is used"]
    if not (folder / CONFIG).is_file():
        raise InputError(_no_model(folder))
    whole_file(folder / CONFIG)
    return folder, notes


def title_of(folder: Path) -> str:
    """What a model is called: its name at the hub, if its folder is in the hub's cache, or the folder's."""
    whole = Path(os.path.abspath(folder))
    near = (whole, *whole.parents[:2])
    found = next((match for each in near if (match := _HUB.fullmatch(each.name))), None)
    return found[2].replace("--", "/") if found else whole.name


def weight_files(folder: Path) -> list[str]:
    """The names of the safetensors files with a model's weights. InputError where some are missing, or are
    not what they are called."""
    here = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    names, by = indexed(folder), f"of {INDEX} "
    if names is None or (SINGLE in here and not set(names) <= here):
        names, by = ([SINGLE] if SINGLE in here else _shards(here)), ""
    names = names or sorted(here - {"adapter_model.safetensors"})
    names = names or sorted(each.name for each in folder.glob("*.safetensors") if each.is_symlink())
    if not names:
        raise InputError(f"{folder} has no safetensors file; {_instead(folder)}")
    if missing := [name for name in names if name not in here]:
        if (folder / missing[0]).is_symlink():
            raise InputError(_broken(folder / missing[0]))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder} lacks {len(missing)} of the {len(names)} files {by}with the weights: "
                         f"{missing[0]}{more}; {_again(folder)}")
    for name in names:
        whole_file(folder / name)
    return names


def whole_file(path: Path) -> None:
    """InputError where a file is a pointer of git-lfs, or is empty: a download that was not ended."""
    try:
        with path.open("rb") as file:
            begin = file.read(256)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    if begin.startswith(_POINTER):
        lines = begin.decode(errors="replace").splitlines()
        size = next((line.removeprefix("size ") for line in lines if line.startswith("size ")), "more")
        raise InputError(f"{path} is a pointer of git-lfs, not the file itself, which has {size} bytes: run "
                         f"git lfs pull in {path.parent}, or {_again(path.parent)}")
    if not begin:
        raise InputError(f"{path} is empty; {_again(path.parent)}")
    if begin.startswith(b"PK\x03\x04"):
        raise InputError(f"{path} is what torch.save writes, not a safetensors file: "
                         f"{_converted(path.parent)}")
    if (kind := kind_of(begin)) is not None:
        raise InputError(f"{path} is {kind.what}; {_again(path.parent)}")


def _no_folder(named: Path) -> str:
    """Why a path that is no folder has no model."""
    if named.is_symlink():
        return _broken(named)
    if named.is_file():
        if named.suffix == ".gguf":
            return f"{named} {_STRANGERS['*.gguf']}"
        kind = "an archive: unpack it, and give" if named.suffix in (".zip", ".gz", ".tar", ".tgz") else \
            "a file: give"
        return f"{named} is {kind} the folder of the model, with config.json and *.safetensors"
    name = _ADDRESS.sub("", str(named))  # Path has made one slash of two
    caches = (os.environ.get("HF_HUB_CACHE"), Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    for cache in caches:
        if cache and _NAME.fullmatch(name):
            kept = Path(cache).expanduser() / f"models--{name.replace('/', '--')}"
            if kept.is_dir():
                return f"there is no folder {name}; a model of this name is in the hub's cache: give {kept}"
    return f"there is no folder {named}; {_GIVE.replace('NAME', name) if _NAME.fullmatch(name) else _GIVE}"


def _no_model(folder: Path) -> str:
    """What a folder without config.json is."""
    config = folder / CONFIG
    if config.is_symlink():
        return _broken(config)
    hub = folder / "hub" if (folder / "hub").is_dir() else folder
    if models := sorted(each for each in hub.glob("models--*") if each.is_dir()):
        return (f"{folder} is the cache of the hub, with {len(models)} "
                f"{'model' if len(models) == 1 else 'models'}; give one:{_listed(models)}")
    if (folder / ADAPTER).is_file():
        return f"{folder} {_adapter(folder)}"
    for pattern, what in _STRANGERS.items():
        if any(folder.glob(pattern)):
            return f"{folder} {what}"
    inside = sorted((each.parent for each in folder.glob(f"*/{CONFIG}")),
                    key=lambda each: each.stat().st_mtime, reverse=True)
    if inside:
        return f"{folder} has no {CONFIG}; did you mean a folder in it, such as:{_listed(inside)}"
    return f"{folder} has no {CONFIG}; {_GIVE}"


def _instead(folder: Path) -> str:
    """What a folder with config.json has in the place of safetensors files, and what to do."""
    if (folder / "layout.json").is_file():
        return ("it is what threed import keeps of a model beside its run: give the folder of the model "
                f"itself, or export the run in {folder.parent}")
    if (folder / ADAPTER).is_file():
        return f"it {_adapter(folder)}"
    if list(folder.glob("*.gguf")):
        return f"it {_STRANGERS['*.gguf']}"
    if list(folder.glob(".cache/huggingface/download/*.incomplete")):
        return f"its download was not ended; {_again(folder)}"
    if others := sorted(each.name for pattern in _OTHERS for each in folder.glob(pattern)):
        return (f"it has {others[0]}, which threed does not read (a pickle can run code when it is read): "
                f"{_converted(folder)}")
    return f"it has no weights at all; {_again(folder)}"


def _converted(folder: Path) -> str:
    return ('load and save it with transformers: python -c "'
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('NEW')\", and copy the files of the tokenizer to "
            "NEW")


def _adapter(folder: Path) -> str:
    base = read(folder / ADAPTER).get("base_model_name_or_path")
    return (f"is an adapter of PEFT for {base or 'another model'}, without its weights: merge the two, "
            'python -c "from peft import AutoPeftModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').merge_and_unload().save_pretrained('NEW')\", copy the files of "
            "the tokenizer to NEW, and import NEW")


def _broken(path: Path) -> str:
    return (f"{path} is a link to a file that is not there, {os.readlink(path)}: the folder was copied "
            "without the files of the hub's cache (cp -rL copies them, too), or they were removed; "
            f"{_again(path.parent)}")


def _again(folder: Path) -> str:
    name = title_of(folder)
    return f"fetch it again: hf download {name if '/' in name else 'NAME'} --local-dir FOLDER"


def _listed(folders: list[Path]) -> str:
    more = f"\n  and {len(folders) - 5} more" if len(folders) > 5 else ""
    return "".join(f"\n  - {each}" for each in folders[:5]) + more


def indexed(folder: Path) -> list[str] | None:
    """The files that the index names; None where there is no index."""
    places = weight_map(folder)
    return None if places is None else sorted(set(places.values()))


def weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> its file, by the index; None where there is no index."""
    file = folder / INDEX
    if not file.is_file():
        return None
    whole_file(file)
    try:
        places = json.loads(file.read_text())["weight_map"]
        if not places or not all(Path(name).name == name for name in places.values()):
            raise ValueError("it names no files of this folder")
        return places
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not an index of safetensors files: {error!r}") from None


def _shards(here: Iterable[str]) -> list[str]:
    """The names of all files of a sharded model, from the name of any one: model-00001-of-00004.safetensors
    says that there are 4. Empty if no name has that form."""
    for match in filter(None, map(_SHARD.fullmatch, sorted(here))):
        begin, number, count = match.groups()
        return [f"{begin}-{index + 1:0{len(number)}}-of-{count}.safetensors" for index in range(int(count))]
    return []


def read(path: Path) -> dict[str, Any]:
    """A JSON object in a file. InputError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {_GIVE}") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} must be a JSON object, not a {type(values).__name__}")
    return values

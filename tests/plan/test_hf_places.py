"""Folders of models: the hub's cache, downloads that did not end, and what is no model: each is named, with
what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from threed.base.errors import InputError
from threed.interop.hf.places import located, read, title_of, weight_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1976163472\n"


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def cached(hub: Path, *snapshots: str, main: str | None = None, name: str = "models--me--tiny") -> Path:
    """A repository in the hub's cache, with files as links to blobs."""
    root = put(hub / name, {"blobs/4d7a": '{"model_type": "llama"}'})
    for age, snapshot in enumerate(snapshots):
        (root / "snapshots" / snapshot).mkdir(parents=True)
        (root / "snapshots" / snapshot / "config.json").symlink_to("../../blobs/4d7a")
        os.utime(root / "snapshots" / snapshot, (1e9 - age, 1e9 - age))
    return put(root, {"refs/main": main}) if main is not None else root


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        located(folder)
    for word in words:
        assert word in str(error.value), str(error.value)


def lacks(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        weight_files(folder)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_no_torch():
    code = "import sys, threed.interop.hf.places; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("inside", ["", "snapshots", "refs", "blobs", "snapshots/abc"])
@pytest.mark.parametrize("snapshots, main", [(["abc"], None), (["abc"], "gone"), (["def", "abc"], "abc\n")])
def test_the_hubs_cache(inside, snapshots, main, tmp_path, monkeypatch):
    root = cached(tmp_path, *snapshots, main=main)
    (root / "refs").mkdir(exist_ok=True)
    folder, notes = located(root / inside)
    assert folder.resolve() == root / "snapshots" / "abc" and title_of(folder) == "me/tiny"
    said = f"{root / inside} is the hub's cache of me/tiny: its snapshot abc is used"
    assert notes == ([] if inside.endswith("abc") else [said])
    monkeypatch.chdir(root / inside)
    assert located(Path())[0].resolve() == root / "snapshots" / "abc"


def test_which_snapshot(tmp_path):
    refused(cached(tmp_path / "two", "abc", "def"), "snapshots are", "/abc", "/def")
    refused(cached(tmp_path / "gone", "abc", "def", main="123"), "/abc", "/def")
    refused(cached(tmp_path / "none", main="123"), "has no snapshot", "download")
    refused(cached(tmp_path / "data", "abc", name="datasets--me--texts"), "a data set in the hub's cache")


def test_the_cache_itself(tmp_path, monkeypatch):
    hub = tmp_path / "home" / "hub"
    kept = cached(hub, "abc")
    refused(hub, "the cache of the hub, with 1 model; give one", str(kept))
    refused(tmp_path / "home", "the cache of the hub", str(hub / "models--me--tiny"))
    for name in ("me/tiny", "https://huggingface.co/me/tiny/tree/main", "hf.co/me/tiny", "hf://me/tiny@main"):
        refused(Path(name), f"there is no folder {Path(name)}", "hf download me/tiny --local-dir")
    for key, value in (("HF_HOME", tmp_path / "home"), ("HF_HUB_CACHE", hub)):
        with monkeypatch.context() as patch:
            patch.setenv(key, str(value))
            refused(Path("me/tiny"), "in the hub's cache: give", str(hub / "models--me--tiny"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert located(Path("~/hub/models--me--tiny"))[0].name == "abc"


def test_copied_without_blobs(tmp_path):
    root = cached(tmp_path, "abc")
    (root / "blobs" / "4d7a").unlink()
    refused(root, "config.json is a link to a file that is not there, ../../blobs/4d7a", "cp -rL",
            "hf download me/tiny --local-dir")
    snapshot = put(cached(tmp_path / "other", "abc") / "snapshots" / "abc", {})
    (snapshot / "model.safetensors").symlink_to("../../blobs/gone")
    lacks(snapshot, "model.safetensors is a link to a file that is not there, ../../blobs/gone")


@pytest.mark.parametrize("files, words", [
    ({"adapter_config.json": '{"base_model_name_or_path": "me/base"}'},
     ["an adapter of PEFT for me/base", "merge_and_unload"]),
    ({"tiny.Q4_K_M.gguf": "GGUF"}, ["llama.cpp (GGUF)", "in safetensors"]),
    ({"model_index.json": "{}"}, ["a pipeline of diffusers"]),
    ({"params.json": "{}", "consolidated.00.pth": ""}, ["the layout of their makers"]),
    ({"latest_checkpointed_iteration.txt": "5"}, ["a checkpoint of Megatron-LM"]),
    ({"zero_to_fp32.py": "", "latest": "global_step5"}, ["a checkpoint of DeepSpeed"]),
    ({".metadata": "", "__0_0.distcp": ""}, ["a distributed checkpoint of torch"]),
    ({"manifest.json": "{}"}, ["a checkpoint of threed"]),
    ({"checkpoint-5/config.json": "{}"}, ["did you mean a folder in it", "/checkpoint-5"]),
    ({"config.json": "<html>Sign in</html>"}, ["a page that a server sent"]),
    ({"config.json": POINTER}, ["a pointer of git-lfs"]), ({"config.json": ""}, ["config.json is empty"]),
    ({"README.md": ""}, ["has no config.json", "hf download NAME"])])
def test_what_is_no_model(files, words, tmp_path):
    refused(put(tmp_path / "theirs", files), str(tmp_path / "theirs"), *words)


@pytest.mark.parametrize("name, words", [
    ("model.safetensors", "is a file: give the folder"), ("tiny.gguf", "llama.cpp (GGUF)"),
    ("tiny.tar.gz", "an archive: unpack it")])
def test_a_file(name, words, tmp_path):
    refused(put(tmp_path, {name: "x"}) / name, words)


SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = f'{{"weight_map": {{"a": "{SHARDS[0]}", "b": "{SHARDS[1]}", "c": "{SHARDS[2]}"}}}}'


def test_files_with_the_weights(tmp_path):
    whole = dict.fromkeys(SHARDS, "x")
    index = {"model.safetensors.index.json": INDEX}
    assert weight_files(put(tmp_path / "whole", {**whole, **index})) == SHARDS
    assert weight_files(put(tmp_path / "bare", {**whole, "consolidated.safetensors": "x"})) == SHARDS
    merged = {"model.safetensors": "x"}
    assert weight_files(put(tmp_path / "old index", {**merged, **index})) == ["model.safetensors"]
    assert weight_files(put(tmp_path / "named", {"b.safetensors": "x", "a.safetensors": "x"})) == [
        "a.safetensors", "b.safetensors"]
    for number, more in enumerate((index, {})):
        some = put(tmp_path / f"some{number}", {SHARDS[0]: "x", SHARDS[2]: "x", **more})
        lacks(some, "lacks 1 of the 3 files ", f"with the weights: {SHARDS[1]}; fetch it again")
    lacks(put(tmp_path / "none", index), "lacks 3 of the 3 files", f"{SHARDS[0]} and 2 more")
    lacks(put(tmp_path / "away", {"model.safetensors.index.json": '{"weight_map": {"a": "../a"}}'}),
          "is not an index")


@pytest.mark.parametrize("files, words", [
    ({"model.safetensors": POINTER}, ["is a pointer of git-lfs", "has 1976163472 bytes", "git lfs pull in"]),
    ({**dict.fromkeys(SHARDS, "x"), SHARDS[1]: POINTER}, [SHARDS[1], "is a pointer of git-lfs"]),
    ({"model.safetensors.index.json": POINTER}, ["index.json is a pointer of git-lfs"]),
    ({"model.safetensors": ""}, ["is empty", "hf download"]),
    ({"pytorch_model.bin": "x"}, ["pytorch_model.bin", "a pickle can run code", "save_pretrained('NEW')"]),
    ({"consolidated.00.pth": "x"}, ["consolidated.00.pth"]), ({"tf_model.h5": "x"}, ["tf_model.h5"]),
    ({"tiny.gguf": "x"}, ["llama.cpp (GGUF)"]),
    ({"adapter_config.json": "{}", "adapter_model.safetensors": "x"}, ["an adapter of PEFT for another"]),
    ({"layout.json": "{}"}, ["what threed import keeps"]),
    ({".cache/huggingface/download/a.incomplete": ""}, ["its download was not ended"]),
    ({"model.safetensors": "<!DOCTYPE html><html>"}, ["a page that a server sent", "fetch it again"]),
    ({"model.safetensors": "PK\x03\x04"}, ["what torch.save writes", "save_pretrained('NEW')"]),
    ({}, ["has no safetensors file", "no weights at all", "hf download NAME"])])
def test_what_is_there_instead(files, words, tmp_path):
    lacks(put(tmp_path / "theirs", {"config.json": "{}", **files}), *words)


def test_json(tmp_path):
    for text, words in (("[]", "must be a JSON object"), ("{", "is not JSON")):
        with pytest.raises(InputError, match=words):
            read(put(tmp_path, {"a.json": text}) / "a.json")
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "b.json")

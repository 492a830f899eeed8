"""The host's memory: of the fullest node, one verdict whoever is asked, and what would make a plan fit."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import threed
from threed.base.errors import InputError
from threed.base.mesh import Mesh
from threed.cli import main as cli
from threed.cli.runs import _fits
from threed.devices import host as memory
from threed.planner import analyse, make_mesh
from threed.planner.from_config import analysed
from threed.prediction import host
from threed.prediction.advise import advise
from threed.prediction.hardware import Hardware
from threed.prediction.host import RankBytes, bytes_of, fullest, remedies
from threed.program.summary import stages
from threed.training import host_room
from threed.training.host_room import check_hosts

TOY = "configs/toy.yaml"
AWAY = ["run.device=auto", "precision.dtype=bf16", "zero.stage=3", "offload.optimizer=cpu",
        "offload.parameters=cpu", "parallel.dp=2", "parallel.tp=1", "parallel.pp=2"]
GB = 10**9


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words))


def needed(over: list[str], node_ranks: int = 8) -> int:
    config = threed.load(TOY, over)
    return host.use_of(config, Hardware(devices=node_ranks), stages(analysed(config))).bytes


def machine(size: float, node_ranks: int = 8) -> str:
    return f"h100-sxm,devices={node_ranks},host_memory_gb={size / GB:.9f},host_free_share=0.2"


def test_the_fullest_node():
    """Positions differ, and the mesh says which of them share a node."""
    rows = [RankBytes(10, 1), RankBytes(30, 1)]
    assert fullest(Mesh(("pp", "dp", "tp"), pp=2, dp=2), 2, rows) == (1, 2, 62), "a position a node"
    assert fullest(Mesh(("dp", "pp", "tp"), pp=2, dp=2), 2, rows) == (0, 2, 42), "one of each"
    assert fullest(Mesh(pp=2, dp=2), 8, rows) == (0, 4, 84), "fewer ranks than a node has"
    assert fullest(Mesh(pp=2, dp=3), 4, rows).bytes == bytes_of(Mesh(pp=2, dp=3), range(4), rows) == 64
    assert fullest(Mesh(dp=16), 8, [RankBytes(10, 1)]) == (0, 8, 88)
    assert fullest(Mesh(dp=4), float("inf"), [RankBytes(0, 0)]).bytes == 0
    groups = Mesh(dp=4, shard=2)  # ranks 0 and 1 have the copies from which checkpoints are written
    assert fullest(groups, 2, [RankBytes(10, 5)]) == (0, 2, 30)
    assert bytes_of(groups, [2, 3], [RankBytes(10, 5)]) == 20


@pytest.mark.parametrize("node_ranks", [1, 2, 8])
def test_to_the_byte(node_ranks):
    need, config = needed(AWAY, node_ranks), threed.load(TOY, AWAY)
    for size, fits in ((need / 0.8 + 2, True), (need / 0.8 - 2, False)):
        told = threed.predict(config, machine(size, node_ranks))
        assert (told["host_too_much"] is None) == fits == told["host"]["fits"]
        assert told["host"]["bytes"] == need and told["host"]["ranks"] == min(node_ranks, 4)


def test_all_say_the_same():
    """predict, check, advise. Only the device's memory was asked: 152 GiB "fitted" 124."""
    need, config = needed(AWAY, 2), threed.load(TOY, AWAY)
    for size, fits in ((need / 0.8 + 2, True), (need / 0.8 - 2, False)):
        hardware = machine(size, 2)
        done = run("check", TOY, *AWAY, "--hardware", hardware)
        assert done.exit_code == (0 if fits else 2)
        assert ("in the host's memory, more than the" in done.stderr) != fits
        assert json.loads(run("check", TOY, *AWAY, "--hardware", hardware, "--json").stdout)["host"] \
            == threed.predict(config, hardware)["host"]
        text = run("predict", TOY, *AWAY, "--hardware", hardware).stdout
        assert ("warning: " in text and "20% stay free" in " ".join(text.split())) != fits
        rows = advise(config, Hardware.parse(hardware), 80 * GB, holds_host=True)
        assert rows[0].fits == fits and rows[0].needs.host.bytes == need
        assert any(row.fits for row in rows), "others need less"
    assert run("check", TOY, *AWAY, "--memory", "80GB").exit_code == 0, "nobody has said what the host is"


def test_init_asks_it(monkeypatch):
    """As `threed init` does for each way that it tries."""
    values = {"model.name": "gpt2-small", "parallel.dp": 2, "zero.stage": 2, "offload.optimizer": "cpu",
              "train.micro_batch_size": 1, "train.global_batch_size": 4, "run.device": "auto",
              "precision.dtype": "bf16"}
    assert _fits(values, 80 * GB)
    monkeypatch.setattr(Hardware, "host_bytes", property(lambda self: GB))
    assert not _fits(values, 80 * GB)


def test_remedies_are_plans():
    """Each that is said to fit does, by a plan of its own, and the first is the largest ratio that does."""
    over = [*AWAY[:3], "zero.stage=2", *AWAY[3:4], "parallel.dp=2", "parallel.tp=1", "parallel.pp=1"]
    config, need = threed.load(TOY, over), needed(over)
    hardware = Hardware.parse(machine(0.85 * need / 0.8))
    found = {each.setting: each for each in remedies(config, hardware)}
    ratio = next(setting for setting in found if setting.startswith("offload.ratio="))
    assert needed([*over, ratio]) == found[ratio].bytes <= hardware.usable_host_bytes
    more = float(ratio.partition("=")[2]) + 0.05
    assert needed([*over, f"offload.ratio={more:g}"]) > hardware.usable_host_bytes
    for setting, each in found.items():
        if "=" in setting and "nvme" not in setting:
            assert needed([*over, *setting.split()]) == each.bytes
            assert each.fits == (each.bytes <= hardware.usable_host_bytes), "the device has room"
    assert found["1 rank a node"].fits and found["1 rank a node"].bytes == needed(over, 1)
    text = host.too_much(host.HostUse(0, 2, need), hardware, config) or ""
    assert f"it fits with {ratio} (" in text
    none = host.too_much(host.HostUse(0, 2, need), Hardware.parse(machine(GB / 1e6)), config) or ""
    assert "no other setting of offload fits host and device: least is" in none


# ---------------------------------------------------------------- at the start of a run


def test_a_run_is_refused_before_anything_is_allocated(monkeypatch):
    """By the memory that the machine has. It was killed in the middle of its start."""
    config = threed.load(TOY, AWAY)
    analysis, mesh = analyse(config), make_mesh(config)
    need = needed(AWAY, 2)
    monkeypatch.setattr(host_room, "memory_bytes", lambda: size)
    free = 100 * need
    monkeypatch.setattr(host_room, "like", lambda device: "h100-sxm")

    def comm() -> Any:
        return SimpleNamespace(mesh=mesh, rank=0, device=torch.device("cpu"), broadcast=lambda value: value,
                               all_gather=lambda mine: [(10 * need, free)] * 2 + [(mine[0], free)] * 2)

    size = 2 * need
    hosts = ["a", "a", "b", "b"]
    assert check_hosts(config, analysis, comm(), hosts) == []
    size = need + 1
    assert "2 ranks on b will hold" in check_hosts(config, analysis, comm(), hosts)[0]
    size = round(0.9 * bytes_of(mesh, [2, 3], [*map(RankBytes.of, stages(analysis))]))
    with pytest.raises(InputError, match=r"2 ranks on b will hold .* and it has .*; it fits with"):
        check_hosts(config, analysis, comm(), hosts)
    size, free = 10 * need, need // 2  # others use it
    with pytest.raises(InputError, match=r"2 ranks on a will hold .* and it has .*, of which .* are free"):
        check_hosts(config, analysis, comm(), hosts)
    nothing = threed.load(TOY, ["checkpoint.background=false"])
    silent = SimpleNamespace(mesh=make_mesh(nothing))
    assert check_hosts(nothing, analyse(nothing), silent, []) == []  # pyright: ignore


def test_large_pages():
    """Zeros that begin where a large page does, as many as were asked for, and nobody else's."""
    for numel in (8, memory.LARGE // 4, memory.LARGE // 4 + 5):
        made, other = (memory.zeros(numel, torch.float32) for _ in range(2))
        assert made.shape == (numel,) and not made.any()
        assert made.untyped_storage().nbytes() == 4 * numel, "as the plan counts"
        made.fill_(1.0)
        assert made.sum() == numel and not other.any()
        assert numel * 4 < memory.LARGE or made.data_ptr() % memory.LARGE == 0

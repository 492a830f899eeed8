"""What a load costs a rank does not grow with the ranks that wrote: index, files and bytes, for 1,024 and
10,240 ranks."""

from __future__ import annotations

import os
import time
from itertools import accumulate

import pytest
import torch

from threed.checkpoint.box_reader import BoxReader
from threed.checkpoint.format import Report, file_name, index_of
from threed.checkpoint.manifest import FORMAT, seal, unseal
from threed.checkpoint.shard_file import Extent, Item, header, report_of
from threed.config.load import load
from threed.features.zero.boxes import boxes
from threed.features.zero.shard import FlatLayout
from threed.planner import layouts, make_mesh, unit_parameters
from threed.schema import Config

KINDS = ("param", "exp_avg", "exp_avg_sq")
# 405 B parameters, as Llama 3 has them, on 16,384 hidden; a unit a layer.
LARGE = ["model.layers=126", "model.hidden=16384", "model.heads=128", "model.kv_heads=8",
         "model.ffn_hidden=53248",
         "model.vocab=128256", "model.seq_len=8192", "model.activation=swiglu", "model.norm=rmsnorm",
         "model.position=rotary",
         "model.tie_embeddings=false", "zero.stage=3", "precision.dtype=bf16"]


def mesh_of(ranks: int, *others: str) -> Config:
    pp, tp = 16, 8
    return load(None, [*LARGE, f"parallel.pp={pp}", f"parallel.tp={tp}", f"parallel.dp={ranks // (pp * tp)}",
                       f"train.global_batch_size={16 * ranks // (pp * tp)}", *others])


def held(config: Config, position: int, laid: dict[int, FlatLayout]) -> dict[int, FlatLayout]:
    """The parameter units of a position: equal runs of all of them."""
    units = sorted(laid)
    first, stop = (len(units) * at // config.parallel.pp for at in (position, position + 1))
    return {unit: laid[unit] for unit in units[first:stop]}


def items(config: Config, laid: dict[int, FlatLayout], position: int, dp: int, tp: int) -> list[Item]:
    return [Item(kind, box, lambda: torch.empty(0)) for layout in held(config, position, laid).values()
            for kind in KINDS
            for box in boxes(layout, {"tp": tp}, *layout.shard(dp)) if tp == 0 or box.axes]


@pytest.fixture(scope="module", params=[1024, 10240])
def written(request, tmp_path_factory):
    """Manifest and index of a checkpoint of so many ranks."""
    config = mesh_of(request.param)
    mesh, laid, path = make_mesh(config), layouts(config), tmp_path_factory.mktemp("large")
    reports = []
    for rank in range(mesh.size):
        here = mesh.coordinate(rank)
        mine = items(config, laid, here.position, here.replica, here.on["tp"])
        sizes = [4 * (item.box.stop - item.box.start) for item in mine]
        head = header(mine)
        starts = accumulate(sizes[:-1], initial=len(head))
        places = [Extent(at, size, 2**32 - 1, 2**64 - 1) for at, size in zip(starts, sizes, strict=True)]
        reports.append(report_of(rank, head, mine, places))
    begin = time.process_time()
    index, parameters = index_of(reports)
    (path / "index.jsonl").write_bytes(index)
    files = {file_name(rank): [report.size, *report.header] for rank, report in enumerate(reports)
             if report.size}
    others = {"step": 1, "updates": 1, "samples": 1, "skipped": 0, "loss_scaler": {}, "waiting": None,
              "lineage": ["test-0", []],
              "mesh": {"pp": 16, "dp": mesh.sizes["dp"], "tp": 8}, "config": config.to_dict()}
    entries = {name: entry._asdict() for name, entry in parameters.items()}
    text = seal({"format": FORMAT, **others, "parameters": entries, "files": files})
    (path / "manifest.json").write_text(text)
    said = (f"{mesh.size} ranks: index {len(index) / 2**20:.1f} MiB, manifest {len(text) / 2**20:.2f} MiB, "
            f"put together by "
            f"rank 0 in {time.process_time() - begin:.1f} s of one processor")
    return config, laid, path, said


@pytest.mark.parametrize("goes_on", ["same", "smaller", "other"])
def test_what_a_rank_reads(goes_on, written, capsys):
    config, laid, path, said = written
    here = {"same": config, "smaller": mesh_of(config.world_size * 3 // 4 // 128 * 128),
            "other": load(None, [*LARGE, "parallel.pp=8", "parallel.tp=4",
                                 f"parallel.dp={config.world_size // 32}",
                                 f"train.global_batch_size={16 * config.world_size // 32}"])}[goes_on]
    mine = laid if goes_on == "same" else layouts(here)
    begin = time.process_time()
    reader, names = BoxReader(path, unseal(path)), set()
    files, wanted, num_bytes = set(), 0, 0
    for layout in held(here, 1, mine).values():
        for box in boxes(layout, {"tp": 1}, *layout.shard(2)):
            for kind in KINDS:
                parts = reader.plan(kind, box)
                files |= {part.stored.rank for part in parts}
                num_bytes += sum(part.num_bytes for part in parts)
            wanted += 4 * len(KINDS) * (box.stop - box.start)
            names.add(box.name)
    lines = sum(unseal(path).parameters[name].size for name in names)
    with capsys.disabled():
        print(f"\n{said}; on {here.world_size} ranks ({goes_on}) one opens {len(files)} files, reads "
              f"{lines / 2**20:.2f} MiB of the index and {num_bytes / 2**20:.1f} MiB for "
              f"{wanted / 2**20:.1f} MiB of state, planned in {time.process_time() - begin:.2f} s of one "
              "processor")
    assert len(files) <= {"same": 1, "smaller": 4, "other": 12}[goes_on]
    assert num_bytes <= {"same": 1.0, "smaller": 1.0, "other": 1.5}[goes_on] * wanted
    assert lines < 24 << 20


def test_the_manifest_is_small(written):
    """Every rank reads it whole."""
    config, _, path, _ = written
    assert (path / "manifest.json").stat().st_size < 2 << 20
    assert len(unit_parameters(config)) == 128 and os.path.getsize(path / "index.jsonl") < 200 << 20


def test_reports_are_small():
    """What a rank sends to rank 0."""
    config = mesh_of(10240)
    laid = layouts(config)
    mine = items(config, laid, 3, 5, 2)
    head = header(mine)
    report: Report = report_of(5, head, mine, [Extent(0, 0, 0, 0)] * len(mine))
    assert sum(len(text) for some in report.boxes.values() for text in some) < 64 << 10

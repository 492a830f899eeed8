"""What it takes of memory to bring a model of transformers into a run: generated weights are imported by one
process, read by the ranks of a ZeRO-3 run, and exported.

Peaks are of resident memory (VmHWM, which is set back at the beginning of a phase) above what there was
before. Files are read by pread, never mapped, so what the kernel caches of them is in no process's memory. A
phase should take at most the largest parameter, and a tenth: one parameter is in memory at a time, of experts
one expert, and pieces of a file. A rank that is built has its shards and the plan's buffers before it reads;
what building takes is printed beside what is there afterwards.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threed.base.quantity import show_bytes, show_seconds
from threed.checkpoint.load import resume
from threed.comm.process import ProcessComm, file_store
from threed.config.load import load
from threed.engine.engine import Engine
from threed.interop.hf.config import family_of, model_of, values_of
from threed.interop.hf.exporting import SHARD, export_model
from threed.interop.hf.importing import import_model
from threed.interop.hf.slices import TensorPart
from threed.interop.hf.tensors import FileWriter, headers_of, index_text
from threed.models.model import parameters
from threed.planner import forward_plan, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.names import EVALUATE

TIMEOUT_S = 600.0
HIDDEN, HEADS, VOCAB = 4096, 32, 32000


class Phase(NamedTuple):
    name: str
    seconds: float
    peak: int  # bytes above those before
    before: int  # bytes


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])


def measured(name: str, work: Any) -> Phase:
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    begin = time.monotonic()
    work()
    return Phase(name, time.monotonic() - begin, resident("VmHWM") - before, before)


def described(args: argparse.Namespace) -> dict[str, Any]:
    """A Llama, or with experts a Mixtral, of about so many bytes."""
    ffn = 2 * args.hidden
    block = args.hidden * (4 * args.hidden + 3 * ffn * max(1, args.experts) + args.experts)
    table = 2 * args.vocab * args.hidden
    layers = max(1, round((args.gb * 1e9 / args.bytes - table) / block))
    kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "num_local_experts": args.experts, "num_experts_per_tok": min(2, args.experts)}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": args.hidden,
            "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS, "vocab_size": args.vocab, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            "torch_dtype": {4: "float32", 2: "bfloat16"}[args.bytes], **(kind if args.experts else {})}


def generate(folder: Path, args: argparse.Namespace) -> None:
    """The folder of a model, its tensors drawn one after the other."""
    config = described(args)
    family = family_of(config, folder)
    model = model_of(values_of(family, config, folder)[0])
    rows, shapes = family.rows(model), {}
    for each in parameters(model):
        for row in rows[each.name]:
            shapes |= row.shapes(each.stored, model)
    headers = headers_of(shapes, dict.fromkeys(shapes, {4: "F32", 2: "BF16"}[args.bytes]), SHARD)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    writer = FileWriter(folder, headers, "the bench")
    for name, shape in shapes.items():
        writer.write(name, TensorPart(torch.randn(shape), shape))
    writer.close()
    if len(headers) > 1:
        (folder / "model.safetensors.index.json").write_text(index_text(headers))


def serve(rank: int, args: argparse.Namespace, scratch: Path, pipe: Any) -> None:
    """One rank of ZeRO-3 that resumes from the import."""
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        config = load(scratch / "run" / "config.yaml",
                      [f"parallel.dp={args.ranks}", "zero.stage=3", f"train.global_batch_size={args.ranks}",
                       f"optimizer.name={args.optimizer}", "precision.dtype=fp32"])
        comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), TIMEOUT_S,
                           file_store(str(scratch / "store"), args.ranks))
        made: list[Engine] = []
        plan = make_plan(config) if args.training else forward_plan(config, EVALUATE)
        build = measured("build a rank", lambda: made.append(Engine(Analysis(plan), comm)))
        kept = [whole for state in made[0].states.values() for whole in state.kept().values()]
        for whole in kept:  # all pages are there before what is read is counted
            whole.zero_()
        read = measured("read by a rank", lambda: resume(config, made[0].zero))
        pipe.send((read, build, sum(whole.nbytes for whole in kept)))
        comm.all_gather(None)
        made[0].close()
    except BaseException:
        pipe.send(traceback.format_exc())


def alone(work: Any) -> Any:
    """The result of some work in a process of its own."""
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def body() -> None:
        try:
            theirs.send(work())
        except BaseException:
            theirs.send(traceback.format_exc())

    process = context.Process(target=body)
    process.start()
    result = ours.recv()
    process.join()
    if isinstance(result, str):
        raise SystemExit(result)
    return result


def on_ranks(args: argparse.Namespace, scratch: Path) -> list[tuple[Phase, Phase, int]]:
    context: Any = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(args.ranks):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(rank, args, scratch, theirs), daemon=True).start()
        pipes.append(ours)
    results = [pipe.recv() for pipe in pipes]
    for each in results:
        if isinstance(each, str):
            raise SystemExit(each)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="of generated weights")
    parser.add_argument("--bytes", type=int, choices=(2, 4), default=4, help="of a weight: bf16 or fp32")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--experts", type=int, default=0, help="of a block; 0: a model without experts")
    parser.add_argument("--optimizer", default="sgd", help="adamw has two states of zeros beside the weights")
    parser.add_argument("--training", action="store_true",
                        help="ranks that hold gradients as well, not those of threed eval: twice the memory")
    parser.add_argument("--dir", help="on the disk to write to; a temporary folder otherwise")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="threed-bench-", dir=args.dir) as folder:
        scratch = Path(folder)
        alone(lambda: generate(scratch / "theirs", args))
        theirs, run, back = scratch / "theirs", scratch / "run", scratch / "back"
        phases = [alone(lambda: measured("import", lambda: import_model(theirs, run)))]
        ranks = on_ranks(args, scratch)
        phases.append(max((read for read, _, _ in ranks), key=lambda phase: phase.peak))
        build = max((build for _, build, _ in ranks), key=lambda phase: phase.peak)
        phases.append(alone(lambda: measured("export", lambda: export_model(run, back))))
        same = all(filecmp.cmp(theirs / name, back / name, shallow=False) for name in os.listdir(theirs))
        config = load(run / "config.yaml")
    parts = family_of(described(args), Path("config.json")).rows(config.model)
    largest = 4 * max(math.prod(row.box(each.stored)[1]) for each in parameters(config.model)
                      for row in parts[each.name])
    size = args.bytes * sum(each.numel for each in parameters(config.model))
    what = "parameter or expert" if args.experts else "parameter"
    shards, left = max(shards for *_, shards in ranks), phases[1].before - build.before
    rows = [f"{show_bytes(size)} of weights. The largest {what} has {show_bytes(largest)} in fp32, and a "
            f"rank's shards {show_bytes(shards)}. Building a rank takes {show_bytes(build.peak)} at its "
            f"peak, and {show_bytes(left)} remain. What comes back is "
            f"{'the same to the bit' if same else 'NOT the same'}.", "",
            "| phase | peak above | of the largest parameter | resident before | seconds |",
            "|---|--:|--:|--:|--:|"]
    rows += [f"| {phase.name} | {show_bytes(phase.peak)} | {phase.peak / largest:.2f} | "
             f"{show_bytes(phase.before)} | {show_seconds(phase.seconds)} |" for phase in phases]
    text = "\n".join(rows)
    print(text)
    if args.markdown:
        command = " ".join(["python", "bench/run/import.py", *sys.argv[1:]])
        args.markdown.write_text(f"# What it takes to bring weights in\n\n`{command}`, {os.cpu_count()} "
                                 f"cores, torch {torch.__version__}\n\n{text}\n")


if __name__ == "__main__":
    main()

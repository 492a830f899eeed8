"""Every key of the config, and what another value of it changes: row 10 of docs/silent-faults.md.

A new key needs one line in KEYS: what is looked at, where the key matters, and another value

    "zero.prefetch": (plan, ["zero.stage=3", "parallel.dp=4"], 3),

or the test that shows its effect, which must name the key:

    "train.max_skipped": "tests/gloo/test_saving.py::test_steps_that_are_left_out",

or, of what a whole run prints and writes, its line in OUTPUT: another value, and where to look for it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.files import word_level
from tests.harness import loopback, tiny
from tests.running import Run, metrics
from threed.comm.group import Comm
from threed.data.mix import open_splits
from threed.data.tokens import prepare
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.monitor.loggers.logger import About
from threed.monitor.loggers.wandb import Wandb, is_off
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.training.callbacks import Writing

# ---------------------------------------------------------------- what is looked at


def plan(config: Config, folder: Path) -> Any:
    """The programs and sizes, the pools, and which rank is where."""
    made, mesh = make_plan(config), make_mesh(config)
    places = [sorted(mesh.coordinate(rank).on.items()) for rank in range(mesh.size)]
    return made.digest, [Analysis(made).buffers(position) for position in range(mesh.positions)], places


def numbers(config: Config, folder: Path) -> Any:
    """Losses and norms of some steps, and the weights after them."""
    ranks = loopback(config, 4)
    sums = {name: value.double().sum().item() for name, value in ranks.weights.items()}
    return ranks.losses, ranks.norms, sums


def data(config: Config, folder: Path) -> Any:
    """Samples of training, and how many are held out."""
    splits: Any = open_splits(config, prepare(config.data, config.model))
    training, validation = splits
    samples = [training.sample(index) for index in range(4)]
    return [(sample.inputs.tolist(), sample.labels.tolist()) for sample in samples], validation.num_windows


def place_of_data(config: Config, folder: Path) -> Any:
    return prepare(config.data, config.model).prefix


def told(config: Config, folder: Path) -> Any:
    """What wandb is told, besides the config itself."""
    found: dict[str, Any] = {}

    def init(**given: Any) -> Any:
        found.update({name: value for name, value in given.items() if name != "config"})
        return SimpleNamespace(define_metric=lambda *args, **how: None, id="id", dir="run/files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
        patch.setenv("WANDB_MODE", "offline")
        if not is_off(config):
            Wandb().start(About(config, 0, False, print), None)
    return found


def texts(config: Config, folder: Path) -> Any:
    """What a run writes between its steps."""
    made, tokenizer, written = make_plan(config), word_level(folder / "words.json", *"?abcdefgh"), []

    def work(comm: Comm) -> None:
        trainer: Any = SimpleNamespace(
            config=config, rank=comm.rank, comm=comm, engine=Engine(Analysis(made), comm),
            tokenizer=tokenizer, watch=SimpleNamespace(phase=lambda text: nullcontext()),
            meter=SimpleNamespace(excluded=nullcontext),
            log=SimpleNamespace(texts=lambda step, rows: written.append((step, rows))))
        callback: Any = Writing()
        callback.on_start(trainer)
        for number in (1, 2):
            callback.on_step_end(trainer, SimpleNamespace(number=number))

    run_loopback(made, make_mesh(config), work)
    return written


# ---------------------------------------------------------------- a whole run

RUN = ["train", "configs/toy.yaml", "parallel.dp=1", "parallel.tp=1", "parallel.pp=2", "model.layers=2",
       "model.hidden=16", "model.heads=2", "model.seq_len=16", "model.vocab=300", "train.global_batch_size=2",
       "train.micro_batch_size=1", "train.steps=4", "train.eval_every=0", "checkpoint.every=1",
       "checkpoint.keep=2", "monitor.wandb=disabled"]
# Of two runs, one without and one with all of these: key -> (another value, what of a run is looked at).
OUTPUT: dict[str, tuple[Any, Callable[[Path, str], Any]]] = {
    "monitor.console_every": (
        3, lambda run, said: len(re.findall("^step ", said, re.MULTILINE)) == len(metrics(run))),
    "monitor.trace_every": (0, lambda run, said: sorted(path.name for path in run.glob("trace/*"))),
    "monitor.peak_tflops": (1.0, lambda run, said: metrics(run)[-1]["perf/mfu"] is None),
    "checkpoint.every": (2, lambda run, said: any(step % 2 for step in saved(run)[:-1])),
    "checkpoint.keep": (0, lambda run, said: len(saved(run))),
    "train.steps": (7, lambda run, said: len(metrics(run))),
    "train.eval_every": (2, lambda run, said: [row["step"] for row in metrics(run) if "val/loss" in row]),
    "run.verify_every": (2, lambda run, said: "integrity/verified_steps" in metrics(run)[-1]),
    "run.dir": ("changed", lambda run, said: run.name),
}


def saved(run: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["step"] for path in run.glob("checkpoints/*/manifest.json"))


def outputs(folder: Path, *common: str) -> dict[str, tuple[Any, Any]]:
    """key of OUTPUT -> what two runs show."""
    changes = [f"{key}={value}" for key, (value, _) in OUTPUT.items() if key != "run.dir"]
    seen = []
    for name, others in (("usual", []), ("changed", changes)):
        run = Run(folder, *RUN, *common, f"run.dir={folder / name}", *others)
        assert run.wait() == 0, run.output
        seen.append({key: look(folder / name, run.output) for key, (_, look) in OUTPUT.items()})
    return {key: (seen[0][key], seen[1][key]) for key in OUTPUT}


# ---------------------------------------------------------------- the keys

Row = tuple[Callable[[Config, Path], Any], list[str], Any]
PP, DP, TP = ["parallel.pp=2"], ["parallel.dp=2"], ["parallel.tp=2"]
FULL = ["activation.policy=full"]
EXPERTS = ["model.family=moe", "model.ffn_hidden=24"]
INTERLEAVED = [*PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2"]
MUON = ["optimizer.name=muon"]
LINEAR, WSD = ["optimizer.schedule=linear"], ["optimizer.schedule=wsd"]
LORA = ["model.lora_rank=2", "model.lora_alpha=2"]
ANSWERS = ["data.source={folder}/answers.jsonl", "data.loss_mask=answers"]
CHAT = ["data.source={folder}/chat.jsonl", "data.loss_mask=chat", "data.chat_template={folder}/chat.jinja"]
TEXT = ["train.sample_every=1", "train.sample_prompts=[a,b]", "train.sample_tokens=4", "model.init_std=0.3"]
TRAPS = "tests/loopback/test_traps.py::test_a_key_that_has_no_effect"
RESTARTS = "tests/gloo/test_restart.py::"

KEYS: dict[str, Row | str] = {
    "model.family": (numbers, [], "llama"),
    "model.name": (plan, [], "gpt2-small"),
    "model.layers": (plan, [], 4),
    "model.hidden": (plan, [], 64),
    "model.heads": (numbers, [], 4),
    "model.kv_heads": (plan, [], 2),
    "model.head_dim": (plan, [], 6),
    "model.ffn_hidden": (plan, [], 48),
    "model.vocab": (numbers, [], 100),
    "model.vocab_multiple": (plan, [], 200),
    "model.seq_len": (plan, [], 8),
    "model.position": (numbers, [], "learned"),
    "model.rope_theta": (numbers, [], 100),
    "model.rope_scaling": (numbers, [], [8.0, 1.0, 4.0, 8.0]),
    "model.norm": (numbers, [], "rmsnorm"),
    "model.norm_eps": (numbers, [], 1e-2),
    "model.activation": (numbers, [], "swiglu"),
    "model.bias": (plan, [], False),
    "model.qkv_bias": (plan, ["model.bias=false"], True),
    "model.qk_norm": (numbers, [], True),
    "model.dropout": (numbers, [], 0.1),
    "model.attention_dropout": (numbers, [], 0.1),
    "model.init_std": (numbers, [], 0.2),
    "model.tie_embeddings": (plan, [], False),
    "model.fused": (plan, [], "off"),
    "model.loss_chunk": (plan, ["model.fused=off"], 5),
    "model.tile_linears": (plan, ["model.tie_embeddings=false"], "8KiB"),
    "model.lora_rank": (plan, [], 2),
    "model.lora_alpha": (numbers, LORA, 8),
    "model.lora_targets": (plan, LORA, ["up_proj"]),
    "parallel.dp": (plan, [], 2),
    "parallel.tp": (plan, [], 2),
    "parallel.pp": (plan, [], 2),
    "parallel.cp": (plan, [], 2),
    "parallel.cp_form": (plan, ["parallel.cp=2"], "heads"),
    "parallel.cp_order": "tests/loopback/test_context_order.py::test_losses_are_those_of_zigzag",
    "parallel.cp_overlap": (plan, ["parallel.cp=2"], True),
    "parallel.schedule": (plan, PP, "zb-h1"),
    "parallel.virtual_stages": (plan, INTERLEAVED, 3),
    "parallel.group": (plan, ["parallel.schedule=vertical"], 1),
    "parallel.activation_limit": "tests/plan/test_auto.py::test_auto_in_a_plan",
    "parallel.sequence_parallel": (plan, TP, True),
    "parallel.ep": (plan, [*EXPERTS, *DP], 2),
    "parallel.pair": (plan, [*EXPERTS, *DP, "parallel.ep=2"], True),
    "parallel.split_messages": (plan, [*PP, *TP], "on"),
    "parallel.axis_order": (plan, [*DP, *TP], "tp-dp-pp"),
    "parallel.layers_per_unit": (plan, [], 2),
    "parallel.costs": "tests/loopback/test_schedules.py::test_measured_costs",
    "parallel.stage_units": (plan, PP, [3, 5]),
    **dict.fromkeys(("zero.stage", "zero.shard_size", "zero.reduce_every", "zero.residency", "zero.prefetch",
                     "zero.persist_below"), TRAPS),
    "activation.policy": (plan, [], "full"),
    "activation.every": (plan, FULL, 2),
    "activation.pieces": (plan, ["activation.policy=selective"], ["attention"]),
    "activation.budget": "tests/plan/test_activation_plan.py::test_budget",
    "activation.partition": (plan, [*FULL, *TP], True),
    "activation.offload": (plan, FULL, "cpu"),
    "activation.contiguous": (plan, FULL, True),
    **dict.fromkeys(("offload.optimizer", "offload.ratio", "offload.parameters", "offload.gradients",
                     "offload.overlap"), TRAPS),
    "offload.nvme_path": "tests/gloo/test_offload_faults.py::test_no_folder",
    **dict.fromkeys(("precision.dtype", "precision.loss_scale", "precision.initial_loss_scale",
                     "precision.loss_scale_window", "precision.hysteresis", "precision.min_loss_scale",
                     "precision.grad_dtype", "precision.reduce_dtype", "precision.master"), TRAPS),
    "optimizer.name": (numbers, [], "lion"),
    "optimizer.lr": (numbers, [], 2e-3),
    "optimizer.momentum": (numbers, MUON, 0.5), "optimizer.nesterov": (numbers, MUON, False),
    "optimizer.matrices": (numbers, MUON, "heads"), "optimizer.turns": (numbers, MUON, 3),
    "optimizer.turn_coefficients": (numbers, MUON, [2.0, -1.5, 0.5]),
    "optimizer.turn_eps": (numbers, MUON, 1e3),
    "optimizer.turn_scale": (numbers, MUON, "original"), "optimizer.turn_dtype": (numbers, MUON, "fp32"),
    "optimizer.adamw_lr": (numbers, MUON, 2e-3), "optimizer.adamw_weight_decay": (numbers, MUON, 0.5),
    "optimizer.betas": (numbers, [], [0.5, 0.5]),
    "optimizer.eps": (numbers, [], 1e-3),
    "optimizer.weight_decay": (numbers, [], 0.5),
    "optimizer.clip_grad": (numbers, [], 0.1),
    "optimizer.balance_rate": (numbers, [*EXPERTS, "model.balance=bias"], 1.0),
    "optimizer.warmup_steps": (numbers, [], 3),
    "optimizer.decay_steps": (numbers, LINEAR, 3),
    "optimizer.wsd_decay_steps": (numbers, WSD, 4),
    "optimizer.schedule": (numbers, [], "linear"),
    "optimizer.min_lr": (numbers, LINEAR, 5e-4),
    "data.source": (data, [], "{folder}/other.jsonl"),
    "data.mix": (data, [], ["1 {folder}/one.jsonl", "1 {folder}/other.jsonl"]),
    "data.tokenizer": (data, [], "{folder}/words.json"),
    "data.text_key": (data, ["data.source={folder}/answers.jsonl"], "answer"),
    "data.append_eod": (data, [], False),
    "data.prepend_bos": "tests/data/test_loss_mask.py::test_a_document_begins_as_its_tokenizer_says",
    "data.document_mask": (data, [], True),
    "data.loss_mask": (data, ["data.source={folder}/answers.jsonl"], "answers"),
    "data.prompt_key": (data, ANSWERS, "text"),
    "data.answer_key": (data, ANSWERS, "text"),
    "data.messages_key": (data, CHAT, "others"),
    "data.chat_template": (data, CHAT, "{folder}/other.jinja"),
    "data.packing": (data, [], "best-fit"),
    "data.on_bad_row": "tests/data/test_bad_rows.py::test_bad_rows_are_skipped_and_counted",
    "data.bad_rows_limit": "tests/data/test_bad_rows.py::test_bad_rows_are_skipped_and_counted",
    "data.on_change": "tests/gloo/test_starts.py::test_other_data_that_are_accepted",
    "data.validation_fraction": (data, [], 0.3),
    "data.cache": (place_of_data, [], "{folder}/elsewhere"),
    "train.global_batch_size": (plan, [], 16),
    "train.micro_batch_size": (plan, [], 2),
    "train.seed": (numbers, [], 7),
    "train.eval_batches": "tests/silent/test_gradients.py::test_an_evaluation_of_uneven_batches",
    "train.sample_every": (texts, TEXT, 2),
    "train.sample_prompts": (texts, TEXT, ["c", "b"]),
    "train.sample_tokens": (texts, TEXT, 5),
    "train.sample_temperature": (texts, TEXT, 0.0),
    "train.resume": "tests/gloo/test_train.py::test_other_settings_on_resume",
    "train.on_nonfinite": "tests/gloo/test_train.py::test_a_loss_that_is_not_finite",
    "train.max_skipped": "tests/gloo/test_saving.py::test_steps_that_are_left_out",
    "checkpoint.background": "tests/loopback/test_checkpoint.py::test_a_copy_of_one_moment",
    "checkpoint.copy_to": "tests/gloo/test_copy.py::test_there_and_back",
    "checkpoint.copy_keep": "tests/gloo/test_copy.py::test_there_and_back",
    "checkpoint.copy_wait_s": "tests/gloo/test_copy.py::test_asked_to_stop_while_a_server_hangs",
    "monitor.loggers": "tests/gloo/test_loggers.py::test_all_five",
    "monitor.prometheus_port": "tests/gloo/test_loggers.py::test_all_five",
    "monitor.prometheus_file": "tests/gloo/test_loggers.py::test_all_five",
    "monitor.quiet": "tests/gloo/test_console.py::test_a_quiet_run",
    "monitor.wandb": (told, [], "offline"),
    "monitor.project": (told, ["monitor.wandb=offline"], "another"),
    "monitor.name": (told, ["monitor.wandb=offline"], "another"),
    "monitor.group": (told, ["monitor.wandb=offline"], "another"),
    "monitor.tags": (told, ["monitor.wandb=offline"], ["another"]),
    "monitor.timeline_every": "tests/gloo/test_trace.py::test_metrics_and_wandb",
    "monitor.report": "tests/plan/test_reporting.py::test_none_is_made",
    "run.timeout_s": "tests/gloo/test_train.py::test_a_rank_that_stops_answering",
    "run.connect_timeout_s": "tests/gloo/test_nodes.py::test_a_node_that_never_comes",
    "run.device": "tests/loopback/test_device.py::test_devices",
    "run.deterministic": "tests/loopback/test_device.py::test_a_deterministic_run",
    "run.attention_backend": "tests/loopback/test_device.py::test_what_cannot_run_is_refused",
    "run.cuda_graphs": "tests/loopback/test_late_lanes.py::test_all_at_once",
    "run.stop_after": "tests/gloo/test_console.py::test_a_run_ends_before_its_time_is_over",
    "run.restarts": f"{RESTARTS}test_it_gives_up",
    "run.restart_wait_s": f"{RESTARTS}test_stopped_while_it_waits",
}


LOOKED_AT = {key: row for key, row in KEYS.items() if not isinstance(row, str)}
SHOWN_BY = {key: row for key, row in KEYS.items() if isinstance(row, str)}  # key -> the test


def config_of(where: list[str], folder: Path) -> Config:
    base = ["model.layers=6", "model.vocab=300", "monitor.wandb=disabled", "data.source={folder}/one.jsonl",
            "data.cache={folder}/cache", "data.validation_fraction=0.1", f"run.dir={folder / 'run'}"]
    if any(text.startswith("data.mix=") for text in where):  # in place of the source
        base = [text for text in base if not text.startswith("data.source=")]
    return tiny(*(text.replace("{folder}", str(folder)) for text in (*base, *where)))

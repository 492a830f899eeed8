"""Sections of the training: optimizer, data, steps and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from threed.base.paths import expanded, of_mix
from threed.optim.registry import OPTIMIZERS
from threed.schema.keys import key


def _betas(value: list[float]) -> Iterator[str]:
    """What is wrong: how the message goes on after the key."""
    if len(value) != 2 or not all(0 <= beta < 1 for beta in value):
        yield f"={value}: must be two numbers in [0, 1)"


def _turns(value: int) -> Iterator[str]:
    if value > 20:
        yield f"={value}: must be at most 20; 5 bring singular values to about 1"


def _coefficients(value: list[float]) -> Iterator[str]:
    if len(value) != 3 or not all(map(math.isfinite, value)):
        yield f"={value}: must be three numbers a, b and c of a X + b X X^T X + c (X X^T)^2 X"


@dataclass
class OptimizerConfig:
    name: str = key("adamw", choices=OPTIMIZERS)
    lr: float = key(3e-4, "learning rate after warm-up", least=0)
    betas: list[float] = key([0.9, 0.95], "of adamw and lion", check=_betas)
    eps: float = key(1e-8, "of adamw", least=0)
    momentum: float = key(0.95, "of muon and polar, as those below", least=0, below=1)
    nesterov: bool = key(True, "what is turned is a mean of the gradient and its moment")
    matrices: str = key("projections", "what is turned as one", choices={
        "projections": "queries, keys and values apart, gate and up apart, each expert apart",
        "heads": "each head of queries, keys and values apart, too"})
    turns: int = key(5, "iterations of Newton and Schulz, of muon", least=1, check=_turns)
    turn_coefficients: list[float] = key([3.4445, -4.7750, 2.0315], "of muon's iteration",
                                         check=_coefficients)
    # (Squares of numbers below 1e-19 are 0 in fp32: a smaller least norm would not bound what it divides.)
    turn_eps: float = key(1e-15, "the least norm by which muon divides a matrix", above=0)
    turn_scale: str = key("match_rms_adamw", "of the learning rate, for a matrix of m x n", choices={
        "match_rms_adamw": "0.2 sqrt(max(m, n)): updates as large as AdamW's",
        "original": "sqrt(max(1, m / n))"})
    turn_dtype: str = key("bf16", "in which matrices travel and are turned", choices=("bf16", "fp32"))
    adamw_lr: float | None = key(None, "learning rate, after warm-up, of what adamw steps beside muon or "
                                 "polar; it follows the same schedule; null: lr", least=0)
    adamw_weight_decay: float | None = key(None, "of what adamw steps beside muon or polar; null: "
                                           "weight_decay", least=0)
    weight_decay: float = key(0.1, "not on biases, norms and other 1-D parameters", least=0)
    clip_grad: float = key(1.0, "global gradient norm; 0 is off", least=0)
    balance_rate: float = key(1e-3, "by how much a bias of model.balance=bias moves in a step", least=0)
    warmup_steps: int = key(0, "linear from 0", least=0)
    decay_steps: int | None = key(None, "step at which min_lr is reached; null: train.steps", least=1)
    wsd_decay_steps: int | None = key(
        None, "length of the final decay of wsd; null: a tenth of decay_steps", least=0)
    schedule: str = key("cosine", choices=("constant", "linear", "cosine", "wsd"))
    min_lr: float = key(0.0, "learning rate at the end of the decay", least=0)


@dataclass
class DataConfig:
    source: str = key("python-stdlib", "or a folder, a glob of text, *.jsonl, *.json (.gz, .xz, .bz2, "
                      ".zst), *.parquet, or a Megatron .bin/.idx prefix", path=expanded)
    mix: list[str] | None = key(None, 'several sources instead, each "WEIGHT SOURCE": weights are shares of '
                                "samples", path=of_mix)
    tokenizer: str = key("bpe", "bpe: byte-level BPE trained on the source; or a tokenizer.json, or the "
                         "folder of a model that has one", path=expanded)
    on_bad_row: str = key("error", "a line or row that cannot be used (not JSON, no text in the field)",
                          choices={"error": "", "skip": "such rows are left out and counted"})
    bad_rows_limit: int = key(100, "skip: most of them in a source; more end the preparation", least=1)
    text_key: str = key("text", "the field of a line or row that holds the text")
    append_eod: bool = key(True, "an end-of-document token after each document")
    prepend_bos: bool = key(False, "what the tokenizer.json itself puts before a text, such as <s>, before "
                            "each document")
    document_mask: bool = key(False, "attention stays inside a document, and positions begin anew in each")
    loss_mask: str = key("none", "what counts in the loss", choices={
        "none": "all tokens", "answers": "of lines with prompt and answer",
        "chat": "what the assistant says in messages"})
    prompt_key: str = key("prompt", "answers: the field of a line or row that holds the prompt")
    answer_key: str = key("answer", "answers: the field that holds the answer")
    messages_key: str = key("messages", "chat: the field that holds the list of messages")
    chat_template: str | None = key(
        None, "chat: a Jinja file; null: what lies beside the tokenizer.json", path=expanded)
    packing: str = key("stream", choices={
        "stream": "windows follow each other and cut documents",
        "best-fit": "whole documents are packed into windows, and little is padded"})
    validation_fraction: float = key(0.02, "share of tokens held out, whole documents", least=0, below=1)
    on_change: str = key("error", "where a run goes on and data or tokenizer have another content than its "
                         "checkpoint's", choices={"error": "", "accept": "and say so"})
    cache: str | None = key(None, "where prepared data is kept; null: $XDG_CACHE_HOME/threed or "
                            "~/.cache/threed", path=expanded)

    # Of source and tokenizer those that nobody has named, neither in a file nor as an override.
    left_out = tuple[str, ...]()


@dataclass
class TrainConfig:
    steps: int = key(100, "optimizer steps of the run", least=0)
    global_batch_size: int = key(16, "sequences a step, over all ranks", least=1)
    micro_batch_size: int = key(1, "sequences of one forward on one rank", least=1)
    seed: int = key(1234, "of initial weights, data order and dropout", least=0)
    eval_every: int = key(0, "0: never", least=0)
    eval_batches: int = key(1, "global batches an evaluation", least=1)
    sample_every: int = key(0, "steps between texts that the model writes, on the console and in wandb; 0: "
                            "never", least=0)
    sample_prompts: list[str] = key([], 'the beginnings of these texts; "": nothing but an end-of-text token')
    sample_tokens: int = key(64, "most tokens that are added to a prompt", least=1)
    sample_temperature: float = key(
        1.0, "0: always the most likely token; 1: as likely as the model says", least=0)
    resume: str = key("auto", "auto: the newest complete checkpoint in run.dir | never | a checkpoint's "
                      "folder or address (copy_to), or a run's folder, whose newest is meant", path=expanded)
    on_nonfinite: str = key("stop", choices={
        "stop": "the run ends and says where", "skip": "the step is skipped and counted"})
    max_skipped: int = key(10, "steps in a row that skip leaves out before the run ends; 0: no limit",
                           least=0)


@dataclass
class CheckpointConfig:
    every: int = key(0, "steps; 0: only at the end", least=0)
    keep: int = key(2, "the newest ones kept; 0: all", least=0)
    background: bool = key(True, "written from a copy on the host while the run goes on; false: the run "
                           "waits")
    copy_to: str | None = key(None, "complete ones are copied to s3://BUCKET/RUN, gs://BUCKET/RUN or a "
                              "folder; null: nowhere", path=expanded)
    copy_keep: int = key(0, "the newest copies kept; 0: all", least=0)
    copy_wait_s: float = key(60.0, "how long a run that is asked to stop waits for its last copy", least=0)

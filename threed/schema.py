"""The schema: every key of a config, its type and its default. `threed.config.load` reads and checks it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from threed.base.mesh import AXES
from threed.base.quantity import round_up
from threed.schedules.orders import SCHEDULES


@dataclass
class ModelConfig:
    """Sizes of the model. A named size (`name`, threed/models/families) gives other defaults."""

    family: str = "gpt"  # gpt | llama, or one of your own: package.module:name or file.py:name
    name: str = "custom"  # custom, or a size: gpt2-small, llama3.1-8b ...; other keys of the section win over
    # it
    layers: int = 8  # transformer blocks
    hidden: int = 128  # width of the residual stream
    heads: int = 8  # attention heads
    kv_heads: int | None = None  # null: as many as heads
    head_dim: int | None = None  # numbers of a head; null: hidden / heads
    ffn_hidden: int | None = None  # null: 4 x hidden (gelu), or 8/3 x hidden rounded up to 64 (swiglu)
    vocab: int = 1024  # tokens of the tokenizer
    vocab_multiple: int = 128  # the vocabulary is padded to a multiple of this; padded logits are masked
    seq_len: int = 128  # tokens of a sequence
    position: str = "rotary"  # rotary (turns halves of a head, as GPT-NeoX, not pairs, as GPT-J) | learned
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: list[float] | None = None  # Llama 3's: [factor, low_freq_factor, high_freq_factor, tokens
    # of the sequences before], such as [8, 1, 4, 8192]; null: none
    norm: str = "layernorm"  # layernorm | rmsnorm
    norm_eps: float = 1e-5  # added to the variance in a norm
    activation: str = "gelu"  # gelu | swiglu
    bias: bool = True  # biases of linear layers
    qkv_bias: bool | None = None  # biases of queries, keys and values; null: what bias is
    qk_norm: bool = False  # an RMS norm of each head's queries, and one of its keys, before rotary positions
    dropout: float = 0.0  # after the embedding and on each residual branch
    attention_dropout: float = 0.0  # on attention weights; above 0 attention runs unfused
    init_std: float = 0.02  # standard deviation of initial weights
    tie_embeddings: bool = True  # the head's output matrix is the word embedding
    fused: str = "auto"  # SwiGLU, rotary positions, dropout, RMS norm and the loss keep less for backward:
    # off | auto (compiled on a GPU that has a compiler; off where run.device=cpu) | on (always compiled)
    loss_chunk: int | None = None  # tokens whose logits are in fp32 at a time; null: all of a micro-batch
    tile_linears: str | None = None  # most bytes of linear layers that a unit gathers, such as 64MiB: larger
    # ones become tiles
    lora_rank: int | None = None  # LoRA: all weights are frozen, and adapters of this rank are trained; null:
    # off
    lora_alpha: float | None = None  # what adapters add is multiplied by lora_alpha / lora_rank; null:
    # lora_rank
    lora_targets: list[str] | None = None  # linears with adapters, by PEFT's names: q_proj, k_proj, v_proj,
    # qkv_proj (one for all three, as GPT-2's c_attn), o_proj, gate_proj, up_proj, down_proj; null: q_proj,
    # v_proj

    own_layers = False  # whether the layers are user modules, and the data samples of their own

    @property
    def counted(self) -> str:
        """What the loss is a mean over, and what is counted."""
        return "samples" if self.own_layers else "tokens"

    @property
    def fuses(self) -> bool:
        return self.fused != "off"

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab, self.vocab_multiple)

    @property
    def head_size(self) -> int:
        """Numbers of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def num_ffn_hidden(self) -> int:
        if self.ffn_hidden is not None:
            return self.ffn_hidden
        return 4 * self.hidden if self.activation == "gelu" else round_up(8 * self.hidden // 3, 64)

    @property
    def targets(self) -> tuple[str, ...]:
        """Linears that have adapters."""
        if self.lora_rank is None:
            return ()
        return ("q_proj", "v_proj") if self.lora_targets is None else tuple(self.lora_targets)

    @property
    def lora_scale(self) -> float:
        """What an adapter adds is multiplied by this."""
        assert self.lora_rank is not None
        return 1.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    @property
    def residual_std(self) -> float:
        """GPT-2: projections onto the residual stream start smaller by sqrt(number of residual branches)."""
        return self.init_std / math.sqrt(2 * self.layers)


@dataclass
class LayersConfig(ModelConfig):
    """The section `model` of a model of user layers (threed.Layers), which say themselves what they
    are: no key but `family` has an effect."""

    seq_len: int = 1  # each sample counts as one
    tie_embeddings: bool = False
    own_layers = True


@dataclass
class ParallelConfig:
    """The mesh, and the schedule of its pipeline."""

    dp: int | str = "auto"  # auto: world size / (tp x pp)
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline positions
    schedule: str = "1f1b"  # a name of docs/schedules.md, such as zb-h1; auto; or file:PATH
    virtual_stages: int | None = None  # stages a rank; null: what the schedule has (2 in V shapes, else 1),
    # or any for auto
    activation_limit: str | None = None  # most that a rank may keep: 2x (times 1F1B's peak) or bytes such as
    # 30GiB
    sequence_parallel: bool = False  # outside tensor-parallel layers, activations are cut over tp by sequence
    split_messages: str = "auto"  # tp ranks that hold the same send a part each to the next position, and
    # gather it there: auto (between nodes of 8 GPUs, 1 MiB and more) | on | off
    axis_order: str = "pp-dp-tp"  # outermost first; neighbours on the last axis are neighbouring ranks
    layers_per_unit: int = 1  # transformer blocks a unit
    costs: str | None = None  # measured costs, a run's folder: stages are balanced and auto searches by them;
    # null: by FLOPs
    stage_units: list[int] | None = None  # units of each stage, first to last; null: balanced by cost


@dataclass
class ZeroConfig:
    stage: int = 1  # 0: replicate all. Shard over dp: 1 optimizer state, 2 gradients too, 3 parameters too
    shard_size: int | None = None  # ranks that share one copy (stage 1 up); null: all of dp; fewer: copies
    # between groups (HSDP)
    reduce_every: int | str | None = None  # stage 2, 3: micro-batches between reductions, or step; null: 1
    residency: int | str | None = None  # stage 3: units gathered at a time, or stage, or step (gathered
    # once); null: 1
    prefetch: int | None = None  # stage 3: how many uses ahead a unit is gathered; null: 1
    persist_below: int | None = None  # stage 3: parameters of fewer elements are gathered once a step and
    # stay whole; null: 0


@dataclass
class ActivationConfig:
    policy: str = "none"  # recompute in backward: none | full (units) | selective (pieces of blocks) | budget
    # (fewest units)
    every: int | None = None  # full: every so many units are recomputed; null: 1, all
    pieces: list[str] | None = None  # selective: of attention, norm, mlp_act; null: [norm, mlp_act]
    budget: str | None = None  # budget: most bytes of activations that a rank may keep, such as 8GiB
    partition: bool = False  # full, budget: kept inputs are cut over tp
    offload: str = "none"  # full, budget: kept inputs go to: none | cpu
    contiguous: bool = False  # full, budget: kept inputs lie in one preallocated arena


@dataclass
class OffloadConfig:
    optimizer: str = "none"  # where Adam's moments and fp32 weights live and are stepped: none (the device) |
    # cpu | nvme
    ratio: float = 1.0  # share of the optimizer's state that is offloaded, by units; the device steps the
    # rest meanwhile
    parameters: str = "none"  # stage 3: where this rank's part of the parameters lives: none (the device) |
    # cpu | nvme
    nvme_path: str | None = None  # nvme: a folder on a fast disk of each machine
    delayed_update: bool = False  # the host steps a step's gradients beside the step after it: weights are
    # one update behind
    warmup: int = 0  # delayed_update: steps before the first that is delayed


@dataclass
class PrecisionConfig:
    dtype: str = "fp32"  # of compute, weights as compute reads them, and messages: fp32 | bf16 | fp16
    loss_scale: int | float | str | None = None  # dynamic | a number; null: dynamic for fp16, 1 otherwise
    initial_loss_scale: float = 65536.0  # of dynamic
    loss_scale_window: int = 1000  # updates in a row without an overflow, after which dynamic doubles
    hysteresis: int = 2  # overflows until dynamic halves; the count begins anew when it doubles
    min_loss_scale: float = 1.0  # the least scale of dynamic
    grad_dtype: str = "fp32"  # gradients are accumulated in fp32, or in dtype
    reduce_dtype: str = "fp32"  # gradients are sent over dp in fp32, or in dtype
    master: str = "fp32"  # fp32: a 16-bit weight has an fp32 copy that the optimizer updates | none: it is
    # updated itself


@dataclass
class OptimizerConfig:
    name: str = "adamw"  # adamw | lion | sgd
    lr: float = 3e-4  # learning rate after warm-up
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of adamw and lion
    eps: float = 1e-8  # of adamw
    weight_decay: float = 0.1  # not on biases, norms and other 1-D parameters
    clip_grad: float = 1.0  # global gradient norm; 0 is off
    warmup_steps: int = 0  # linear from 0
    decay_steps: int | None = None  # step at which min_lr is reached; null: train.steps
    wsd_decay_steps: int | None = None  # length of the final decay of wsd; null: a tenth of decay_steps
    schedule: str = "cosine"  # constant | linear | cosine | wsd
    min_lr: float = 0.0  # learning rate at the end of the decay


@dataclass
class DataConfig:
    source: str = "python-stdlib"  # or a folder, a glob of text, *.jsonl, *.json (.gz, .xz, .bz2, .zst),
    # *.parquet, or a Megatron .bin/.idx prefix
    mix: list[str] | None = None  # several sources instead, each "WEIGHT SOURCE": weights are shares of
    # samples
    tokenizer: str = "bpe"  # bpe: byte-level BPE trained on the source; or a tokenizer.json, or the folder
    # of a model that has one
    on_bad_row: str = "error"  # a line or row that cannot be used (not JSON, no text in the field): error |
    # skip (such rows are left out and counted)
    bad_rows_limit: int = 100  # skip: most of them in a source; more end the preparation
    text_key: str = "text"  # the field of a line or row that holds the text
    append_eod: bool = True  # an end-of-document token after each document
    prepend_bos: bool = False  # what the tokenizer.json itself puts before a text, such as <s>, before each
    # document
    document_mask: bool = False  # attention stays inside a document, and positions begin anew in each
    loss_mask: str = "none"  # what counts in the loss: none (all tokens) | answers (of lines with prompt and
    # answer) | chat (what the assistant says in messages)
    prompt_key: str = "prompt"  # answers: the field of a line or row that holds the prompt
    answer_key: str = "answer"  # answers: the field that holds the answer
    messages_key: str = "messages"  # chat: the field that holds the list of messages
    chat_template: str | None = None  # chat: a Jinja file; null: what lies beside the tokenizer.json
    packing: str = "stream"  # stream: windows follow each other and cut documents | best-fit: whole documents
    # are packed into windows, and little is padded
    validation_fraction: float = 0.02  # share of tokens held out, whole documents
    on_change: str = "error"  # where a run goes on and data or tokenizer have another content than its
    # checkpoint's: error | accept (and say so)
    cache: str | None = None  # where prepared data is kept; null: $XDG_CACHE_HOME/threed or ~/.cache/threed


@dataclass
class TrainConfig:
    steps: int = 100  # optimizer steps of the run
    global_batch_size: int = 16  # sequences a step, over all ranks
    micro_batch_size: int = 1  # sequences of one forward on one rank
    seed: int = 1234  # of initial weights, data order and dropout
    eval_every: int = 0  # 0: never
    eval_batches: int = 1  # global batches an evaluation
    sample_every: int = 0  # steps between texts that the model writes, on the console and in wandb; 0: never
    sample_prompts: list[str] = field(default_factory=list)  # the beginnings of these texts; "": nothing but
    # an end-of-text token
    sample_tokens: int = 64  # most tokens that are added to a prompt
    sample_temperature: float = 1.0  # 0: always the most likely token; 1: as likely as the model says
    resume: str = "auto"  # auto: the newest complete checkpoint in run.dir | never | a checkpoint's folder or
    # address (copy_to)
    on_nonfinite: str = "stop"  # stop: the run ends and says where | skip: the step is skipped and counted
    max_skipped: int = 10  # steps in a row that skip leaves out before the run ends; 0: no limit


@dataclass
class CheckpointConfig:
    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # the newest ones kept; 0: all
    background: bool = True  # written from a copy on the host while the run goes on; false: the run waits
    copy_to: str | None = None  # complete ones are copied to s3://BUCKET/RUN, gs://BUCKET/RUN or a folder;
    # null: nowhere
    copy_keep: int = 0  # the newest copies kept; 0: all
    copy_wait_s: float = 60.0  # how long a run that is asked to stop waits for its last copy


@dataclass
class MonitorConfig:
    loggers: list[str] = field(default_factory=lambda: ["wandb"])  # what gets the metrics, besides
    # metrics.jsonl: wandb, tensorboard, mlflow, trackio, prometheus; []: nothing
    wandb: str = "auto"  # auto: online if WANDB_MODE or WANDB_API_KEY says so, else offline | offline |
    # online | disabled
    project: str = "threed"  # project in wandb
    name: str | None = None  # name of the run in wandb; null: the last part of run.dir, and the mesh
    group: str | None = None  # group of the run in wandb
    tags: list[str] = field(default_factory=list)  # of the run in wandb, besides those of its mesh, schedule
    # and precision
    peak_tflops: float | None = None  # of one device, for perf/mfu; null: looked up, null where not known
    console_every: int = 1  # steps between console lines
    trace_every: int = 10  # steps between traced steps, in run.dir/trace; 0: none (otherwise the last step
    # too)
    timeline_every: int = 0  # steps between pictures of the measured timeline in wandb and mlflow; 0: never
    quiet: bool = False  # on the console only warnings, errors and the summary; run.dir/log.txt has all lines
    prometheus_port: int | None = None  # where prometheus reads the metrics; 0: a free one, which the console
    # names
    prometheus_file: str | None = None  # the same as a file, NAME.prom, for the textfile collector of
    # node_exporter
    report: bool = True  # whether wandb gets the page of `threed report` at the end of the run

    @property
    def draws(self) -> bool:
        """Whether a logger may take pictures."""
        return "mlflow" in self.loggers or ("wandb" in self.loggers and self.wandb != "disabled")


@dataclass
class RunConfig:
    dir: str = "runs/default"  # folder of checkpoints, metrics and traces
    timeout_s: float = 600.0  # a rank that waits this long for another ends the run and says for whom
    connect_timeout_s: float = 300.0  # how long machines, and then ranks, wait for each other to come
    device: str = "auto"  # auto | cpu | cuda
    deterministic: bool = False  # on a GPU: the same bits in each run, from slower kernels; what has none is
    # an error
    attention_backend: str = "auto"  # auto: torch chooses, and the log says which | flash | efficient | cudnn
    cuda_graphs: bool = False  # replay a unit's kernels as one CUDA graph, where they are so short that the
    # host cannot issue them in time
    verify_every: int = 0  # every so many steps, one is computed twice and compared, to find a machine that
    # computes wrongly; 0: never
    restarts: int = 3  # most starts after failures from one checkpoint; the count begins anew at a newer one.
    # Under torchrun itself its --max-restarts is the outer bound, and srun starts no task again
    restart_wait_s: float = 5.0  # before the first of them; doubled each time, up to 300
    stop_after: str | None = None  # such as 3h50m, 90m, 2d or seconds: the run saves and ends before so much
    # time has passed since its start, restarts included; null: it does not


@dataclass
class Config:
    """All that a run is asked for: a field for each section of the YAML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    activation: ActivationConfig = field(default_factory=ActivationConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def dp(self) -> int:
        assert isinstance(self.parallel.dp, int), "parallel.dp is not a number yet: call config.checked first"
        return self.parallel.dp

    @property
    def world_size(self) -> int:
        return math.prod(self.axis_sizes.values())

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Ranks along each axis of the mesh."""
        assert isinstance(self.parallel.dp, int), "parallel.dp is not a number yet: call config.checked first"
        return {axis: getattr(self.parallel, axis) for axis in AXES}

    @property
    def num_microbatches(self) -> int:
        return self.train.global_batch_size // (self.train.micro_batch_size * self.dp)

    @property
    def num_stages(self) -> int:
        """Pipeline stages, as far as the config says: `auto` and `file:` have at least this many."""
        schedule = SCHEDULES.get(self.parallel.schedule)
        return self.parallel.pp * (self.parallel.virtual_stages or (schedule and schedule.virtual) or 1)

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of what is sharded."""
        return self.zero.shard_size if self.zero.shard_size is not None else self.dp

    @property
    def pieces(self) -> tuple[str, ...]:
        """Pieces of blocks that are computed again in backward."""
        if self.activation.policy != "selective":
            return ()
        return ("norm", "mlp_act") if self.activation.pieces is None else tuple(self.activation.pieces)

    @property
    def reduce_every(self) -> int:
        """Micro-batches between two reductions of a gradient."""
        every = self.zero.reduce_every
        if self.zero.stage < 2 or every == "step":
            return self.num_microbatches
        return 1 if every is None else int(every)

    @property
    def loss_scale(self) -> float | None:
        """The fixed loss scale; None: dynamic."""
        given = self.precision.loss_scale
        if given is None:
            return None if self.precision.dtype == "fp16" else 1.0
        return None if given == "dynamic" else float(given)

    @property
    def masked(self) -> bool:
        """Whether some tokens do not count in the loss: then its divisor is another in each step."""
        return self.data.document_mask or self.data.loss_mask != "none" or self.data.packing != "stream"

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch_size * self.model.seq_len

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

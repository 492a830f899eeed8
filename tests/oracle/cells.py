"""Cells: a family, sizes, a mesh and the settings of a run, drawn by chance.

Cell `number` of a seed has, of each axis in AXES, the value that comes next in a shuffled order of all
values: so each comes equally often, and any two meet sooner or later. All else is drawn freely. A cell
depends on seed and number alone, so that it can be repeated by itself.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEDULES = {  # name -> stages a position
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "v-half": 2, "v-min": 2,
    "dualpipe-v": 2, "breadth-first": 2, "auto": 2}
VIRTUAL = ("interleaved", "breadth-first")  # which may have more
UNPAIRED = ("gpipe", "breadth-first")  # no forward and backward of theirs are neighbours
EXPERTS = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "dots1": "n_routed_experts"}
AXES: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "llama", "mistral", "qwen2", "qwen3", *EXPERTS),
    "mesh": ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2),
             (3, 1, 2), (4, 1, 2), (4, 2, 1), (2, 4, 1), (1, 2, 4), (1, 1, 3), (2, 1, 4), (8, 1, 1),
             (3, 2, 1)),  # dp, tp, pp
    "schedule": tuple(SCHEDULES),
    "stage": (0, 1, 2, 3),
    "offload": ("none", "none", "cpu", "nvme", "cpu+parameters", "nvme+parameters", "gradients"),
    "activation": ("none", "full", "every", "selective", "budget", "partition", "cpu", "contiguous"),
    "optimizer": ("adamw", "adamw", "sgd", "lion"),
    "dtype": ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32", "bf16", "bf16", "fp16"),
    "tied": (False, True),
    "data": ("stream", "documents", "best-fit", "best-fit-documents", "repeated"),
    "clip": (0.0, 0.3),
    "capacity": (None, 0.5, 1.0),
    "balance": ("none", "sequence"),
    "pair": (False, True),
    "rate": ("constant", "warm-up", "cosine", "linear", "wsd"),
    "groups": (False, True),  # copies of the model: zero.shard_size
    "resumed": (False, False, True),  # whether a checkpoint of the first step goes on, on another mesh
}


@dataclass
class Cell:
    seed: str
    number: int
    values: dict[str, Any]  # of AXES
    model: dict[str, Any] = field(default_factory=dict)  # transformers' config
    keys: dict[str, Any] = field(default_factory=dict)  # threed's
    resumed: dict[str, Any] = field(default_factory=dict)  # those that are others after the first step
    documents: list[list[int]] = field(default_factory=list)

    @property
    def family(self) -> str:
        return self.values["family"]

    def overrides(self, folder: Path, resumed: bool = False) -> list[str]:
        """The overrides of a run in a folder; or those with which it is resumed."""
        keys = {"run.dir": folder / "run", "data.source": folder / "tokens", **self.keys,
                **(self.resumed if resumed else {})}
        if keys.get("offload.optimizer") == "nvme":
            keys["offload.nvme_path"] = folder / "nvme"
        return [f"{key}={_text(value)}" for key, value in keys.items() if value is not None]

    def __str__(self) -> str:
        keys, more = (" ".join(f"{key}={_text(value)}" for key, value in some.items())
                      for some in (self.keys, self.resumed))
        return "\n".join([f"cell {self.number} of seed {self.seed}: {self.family} {self.model}", keys,
                          *([f"after the first step: {more}"] if more else []),
                          f"again: ORACLE_SEED={self.seed} .venv/bin/python -m tests.oracle {self.number}"])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def draw(seed: str, number: int, attempt: int = 0) -> Cell:
    """A cell. `attempt`: how many before it threed has refused; the values of AXES stay, as long as these are
    few."""
    rng = random.Random(f"{seed}/{number}/{attempt}")
    cell = Cell(seed, number, {axis: _next(seed, number, axis) if attempt < 5 else rng.choice(AXES[axis])
                               for axis in AXES})
    Drawing(rng, cell).draw()
    return cell


def _next(seed: str, number: int, axis: str) -> Any:
    values = list(AXES[axis])
    turn, place = divmod(number, len(values))
    random.Random(f"{seed}/{axis}/{turn}").shuffle(values)
    return values[place]


class Drawing:
    """Fills a cell. What depends on each other is drawn together, so that threed refuses few."""

    def __init__(self, rng: random.Random, cell: Cell):
        self.rng, self.cell, self.given, self.keys, self.model = rng, cell, cell.values, cell.keys, cell.model
        self.experts = cell.family in EXPERTS
        self.dp, self.tp, self.pp = self.given["mesh"]
        self.seq_len = self.tp * rng.randint(-(-6 // self.tp), 14 // self.tp)
        self.vocab = rng.choice((61, 74, 97))

    def draw(self) -> None:
        self._mesh()
        self._sizes()
        self._batch()
        self._zero()
        self._offload()
        self._activation()
        self._training()
        if self.given["resumed"]:
            self._resumed()

    def _mesh(self) -> None:
        rng, keys, schedule = self.rng, self.keys, self.given["schedule"]
        self.stages = self.pp * (SCHEDULES[schedule] + (schedule in VIRTUAL and rng.random() < 0.3))
        keys |= {"parallel.dp": self.dp, "parallel.tp": self.tp, "parallel.pp": self.pp,
                 "parallel.schedule": schedule,
                 "parallel.axis_order": rng.choice(("pp-dp-tp", "dp-pp-tp", "tp-pp-dp", "pp-tp-dp"))}
        if schedule in VIRTUAL:
            keys["parallel.virtual_stages"] = self.stages // self.pp
        if schedule == "auto":
            keys["parallel.activation_limit"] = "1.5x"
        if self.tp > 1 and (self.experts or rng.random() < 0.5):
            keys["parallel.sequence_parallel"] = True
        elif self.tp > 1 and self.pp > 1:
            keys["parallel.split_messages"] = rng.choice(("on", "off"))

    def _sizes(self) -> None:
        rng, tp, family = self.rng, self.tp, self.cell.family
        self.layers = max(2 if self.experts else 1, self.stages - 2) + rng.randint(0, 1)
        if not self.experts:
            self._units()
        few = tp >= 4
        kv, size = tp * rng.choice((1,) if few else (1, 1, 2)), rng.choice((4, 6, 10))
        heads = kv * rng.choice((1, 2) if few else (1, 1, 2, 3))
        hidden, inner = self._times(tp, 20, 44), self._times(tp, 20, 60)
        self.keys["model.vocab_multiple"] = tp * rng.choice((1, 8, 64))
        if family == "gpt2":  # heads may be of odd sizes, since positions are learned
            hidden = heads * rng.choice((5, 6) if few else (5, 6, 8))
            self.model |= {"n_embd": hidden, "n_layer": self.layers, "n_head": heads, "n_inner": inner,
                           "n_positions": self.seq_len, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
                           "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        else:
            if family == "qwen2":
                hidden = heads * size
            elif family == "llama":  # transformers wants a multiple of heads
                hidden = self._times(heads, 20, 44)
            elif self.experts and self.given["dtype"] != "fp32":
                hidden += hidden % 2
            self.model |= {"hidden_size": hidden, "intermediate_size": inner,
                           "num_hidden_layers": self.layers, "num_attention_heads": heads,
                           "num_key_value_heads": kv, "head_dim": size,
                           "max_position_embeddings": 64, "rms_norm_eps": rng.choice((1e-5, 1e-6))}
            self._positions()
        self.model |= {"vocab_size": self.vocab, "tie_word_embeddings": self.given["tied"]}
        if self.experts:
            self._experts()
        if rng.random() < 0.2:
            self.keys["model.loss_chunk"] = rng.choice((3, 5))

    def _times(self, factor: int, least: int, most: int) -> int:
        """A multiple of a factor, between these or a little more."""
        return factor * self.rng.randint(-(-least // factor), max(-(-least // factor), most // factor))

    def _units(self) -> None:
        """Units that are not one layer."""
        chance = self.rng.random()
        if chance < 0.15:
            self.keys["parallel.layers_per_unit"] = 2
            self.layers = 2 * max(1, self.stages - 2)
        elif chance < 0.3 and not self.given["tied"]:
            self.keys["model.tile_linears"] = self.rng.choice(("8KiB", "12KiB"))

    def _positions(self) -> None:
        rng, rope = self.rng, {"rope_type": "default", "rope_theta": self.rng.choice((100.0, 1e4, 5e5))}
        if self.cell.family == "llama" and rng.random() < 0.4:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 16}
        if self.cell.family == "mistral":
            self.model["sliding_window"] = rng.choice((None, self.seq_len))
        self.model["rope_parameters"] = rope

    def _experts(self) -> None:
        rng, model, keys, family = self.rng, self.model, self.keys, self.cell.family
        ranks = self.dp * self.tp
        ep = rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
        experts = rng.choice((3, 4, 5, 6)) if ep == 1 else ep * rng.choice((1, 2, 3) if ep > 2 else (2, 3))
        k = rng.randint(1, min(3, experts - 1))
        keys |= {"parallel.ep": ep, "model.balance": self.given["balance"],
                 "model.moe_capacity": self.given["capacity"],
                 "parallel.pair": self.given["pair"] and ep > 1 and self.given["schedule"] not in UNPAIRED,
                 "model.z_loss": rng.choice((0.0, 0.02))}
        if family != "mixtral":  # experts of dots1 are cut over tp where they compute all tokens
            model |= {"moe_intermediate_size": self._times(self.tp if family == "dots1" else 1, 9, 30),
                      "norm_topk_prob": rng.random() < 0.6}
        if family == "dots1":
            keys |= {"model.balance": "bias", "optimizer.balance_rate": rng.choice((0.01, 0.05))}
            groups = next((size for size in (4, 3, 2) if experts % size == 0 and experts // size >= 2
                           and rng.random() < 0.7), 1)
            of_token = rng.randint(1, groups - 1) if groups > 1 else 1
            k = 2 * of_token if groups > 1 else k
            model |= {"n_group": groups, "topk_group": of_token, "n_shared_experts": rng.choice((1, 2)),
                      "first_k_dense_replace": rng.choice((0, 1)),
                      "routed_scaling_factor": rng.choice((1.0, 2.5))}
        elif keys["model.balance"] == "sequence":
            keys["model.balance_weight"] = rng.choice((0.05, 0.5))
        model |= {EXPERTS[family]: experts, "num_experts_per_tok": k}

    def _batch(self) -> None:
        rng, data = self.rng, self.given["data"]
        self.micro = rng.choice((1, 1, 2))
        pair = self.keys.get("parallel.pair", False)
        least = 2 * self.pp if self.given["schedule"] == "dualpipe-v" else 1 + pair
        self.batch = self.dp * self.micro * max(rng.randint(1, 4), least)
        steps = rng.choice((2, 3, 3, 4)) if self.batch <= 16 else 2
        packing, _, apart = data.rpartition("-") if data == "best-fit-documents" else (data, "", data)
        self.keys |= {"model.seq_len": self.seq_len, "train.micro_batch_size": self.micro,
                      "train.seed": rng.randrange(10**6), "train.global_batch_size": self.batch,
                      "train.steps": steps, "data.validation_fraction": 0.0,
                      "data.packing": "best-fit" if packing == "best-fit" else "stream",
                      "data.document_mask": apart == "documents"}
        windows = max(2, math.ceil(self.batch * steps * rng.choice((0.4, 0.7, 1.2))))  # some are read again
        self.cell.documents = self._repeated(windows) if data == "repeated" else self._uniform(windows)

    def _uniform(self, windows: int) -> list[list[int]]:
        """Documents of tokens that are independent, and none 0, which is padding."""
        stream = [self.rng.randrange(1, self.vocab)
                  for _ in range(windows * self.seq_len + self.rng.randint(1, self.seq_len))]
        fits = self.keys["data.packing"] == "best-fit"
        return self._cut(stream, *((5, self.seq_len + 1) if fits else (1, 2 * self.seq_len)))

    def _repeated(self, windows: int) -> list[list[int]]:
        """Nine of ten tokens are one, at first all are; the last two of a window say which it is."""
        often, stream = self.rng.randrange(1, self.vocab), list[int]()
        for window in range(windows):
            head = [often] * (self.seq_len - 2)
            for place in range(len(head) // 2, len(head)):
                if self.rng.random() < 0.1:
                    head[place] = self.rng.randrange(1, self.vocab)
            stream += [*head, *divmod(window, self.vocab)]
        return self._cut([*stream, often], 1, 3 * self.seq_len)

    def _cut(self, stream: list[int], least: int, most: int) -> list[list[int]]:
        documents = []
        while len(stream) >= least:
            size = min(self.rng.randint(least, most), len(stream))
            documents.append(stream[:size])
            stream = stream[size:]
        return documents

    def _zero(self) -> None:
        rng, keys = self.rng, self.keys
        stage = keys["zero.stage"] = 3 if "parameters" in self.given["offload"] else self.given["stage"]
        if self.given["groups"] and stage:  # the ranks with the same experts are divided, too
            same = self.dp * self.tp // keys.get("parallel.ep", 1)
            sizes = [size for size in range(1, self.dp)
                     if self.dp % size == 0 and (not self.experts or same % (self.dp // size) == 0)]
            keys["zero.shard_size"] = rng.choice(sizes) if sizes else None
        if stage >= 2:
            keys["zero.reduce_every"] = rng.choice((1, 2, "step"))
        if stage == 3:
            keys |= {"zero.residency": rng.choice((1, 2, "stage", "step")),
                     "zero.prefetch": rng.choice((0, 1, 2)), "zero.persist_below": rng.choice((0, 0, 50))}

    def _offload(self) -> None:
        rng, keys, offload = self.rng, self.keys, self.given["offload"]
        if offload == "gradients":  # to the host as soon as they are reduced, where they are reduced often
            keys |= {"offload.optimizer": "cpu", "offload.overlap": rng.choice(("next", "none")),
                     "offload.gradients": "host" if keys["zero.stage"] >= 2 else "device"}
        elif offload != "none":
            tier, _, parameters = offload.partition("+")
            keys |= {"offload.optimizer": tier, "offload.parameters": tier if parameters else None,
                     "offload.ratio": rng.choice((1.0, 1.0, 0.5)),
                     "offload.overlap": rng.choice(("next", "next", "none"))}

    def _activation(self) -> None:
        keys, activation = self.keys, self.given["activation"]
        more = {"every": {"activation.every": 2}, "partition": {"activation.partition": True},
                "cpu": {"activation.offload": "cpu"}, "contiguous": {"activation.contiguous": True}}
        if activation == "selective":
            pieces = self.rng.sample(("attention", "norm", "mlp_act"), self.rng.randint(1, 3))
            keys["activation.pieces"] = f"[{','.join(pieces)}]"
        keys |= more.get(activation, {})
        keys["activation.policy"] = "full" if activation in more else activation  # a budget: `drive.planned`

    def _training(self) -> None:
        rng, keys, given, rate = self.rng, self.keys, self.given, self.given["rate"]
        lr = {"adamw": 1e-2, "sgd": 3e-2, "lion": 1e-4}[given["optimizer"]] * rng.choice((1, 0.3))
        keys |= {"optimizer.name": given["optimizer"], "optimizer.lr": lr,
                 "optimizer.betas": rng.choice(("[0.9,0.95]", "[0.8,0.99]")), "optimizer.eps": 1e-2,
                 "optimizer.weight_decay": rng.choice((0.0, 0.1, 1.0)), "optimizer.clip_grad": given["clip"],
                 "optimizer.warmup_steps": 2 if rate == "warm-up" else 0,
                 "optimizer.schedule": "constant" if rate == "warm-up" else rate,
                 "optimizer.min_lr": 0.0 if rate in ("constant", "warm-up") else 1e-3 * lr,
                 "precision.dtype": given["dtype"]}
        if given["dtype"] == "fp16":
            keys["precision.loss_scale"] = 256
        elif given["dtype"] == "bf16" and not self.experts and rng.random() < 0.3:
            keys["precision.reduce_dtype"] = "bf16"

    def _resumed(self) -> None:
        """Another mesh and schedule, of at most 8 ranks."""
        rng, keys = self.rng, self.keys
        units = self.layers // keys.get("parallel.layers_per_unit", 1) + 2
        while True:
            tp, pp, schedule = rng.choice((1, self.tp)), rng.choice((1, 2, 3)), rng.choice(list(SCHEDULES))
            dp = rng.choice([size for size in range(1, 9) if self.batch % (size * self.micro) == 0])
            count = self.batch // (dp * self.micro)
            if (dp * tp * pp <= 8 and pp * SCHEDULES[schedule] <= units
                    and count >= (2 * pp if schedule == "dualpipe-v" else 1)):
                break
        self.cell.resumed = {
            "parallel.dp": dp, "parallel.tp": tp, "parallel.pp": pp, "parallel.schedule": schedule,
            "parallel.virtual_stages": 2 if schedule in VIRTUAL else None,
            "parallel.activation_limit": "1.5x" if schedule == "auto" else None,
            "parallel.sequence_parallel": tp > 1, "parallel.split_messages": None, "zero.shard_size": None}
        if self.experts:
            experts = self.model[EXPERTS[self.cell.family]]
            ep = rng.choice([size for size in range(1, experts + 1)
                             if dp * tp % size == 0 and experts % size == 0])
            self.cell.resumed |= {
                "parallel.ep": ep,
                "parallel.pair": ep > 1 and count > 1 and schedule not in UNPAIRED and rng.random() < 0.5}

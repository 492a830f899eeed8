"""Models of transformers in and out: random weights of small configs, whose logits are compared with those of
transformers, on several meshes; and files that come back to the bit.

A loose tolerance would pass a rotation of wrong pairs, or a key in the place of a value: fp32 logits agree
to 1e-5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from tests.harness import batches
from tests.loopback.test_checkpoint import manifest, saved_after
from tests.reference import data_of
from threed.base.errors import InputError
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.interop.hf import exporting
from threed.interop.hf.exporting import export_model
from threed.interop.hf.importing import import_model
from threed.interop.hf.tensors import DTYPES, NAMES
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.spec.deal import zigzag
from threed.tensor.context import Batch, Context
from threed.tensor.places import in_order

transformers = pytest.importorskip("transformers", reason="the peer is transformers: pip install -e '.[dev]'")

SEQ, VOCAB = 16, 90
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": SEQ, "vocab_size": VOCAB,
                      "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2-untied": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": SEQ, "vocab_size": VOCAB,
                             "n_inner": 72, "tie_word_embeddings": False, "attn_pdrop": 0.0,
                             "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "llama2": ("Llama", {**LLAMA, "num_key_value_heads": 4}),
    "llama3": ("Llama", {**LLAMA, "rope_parameters": SCALED}),
    "llama3-tied": ("Llama", {**LLAMA, "rope_parameters": SCALED, "tie_word_embeddings": True,
                              "head_dim": 16}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": None}),
    "mistral-window": ("Mistral", {**LLAMA, "sliding_window": SEQ, "head_dim": 12}),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 12}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**LLAMA, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3-moe-unnormalized": ("Qwen3Moe", {**LLAMA, "num_experts": 8, "num_experts_per_tok": 1,
                                            "moe_intermediate_size": 40, "norm_topk_prob": False}),
    "dots1": ("Dots1", {**LLAMA, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
                        "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
                        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1}),
    "dots1-groups": ("Dots1", {**LLAMA, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4,
                               "topk_group": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
                               "first_k_dense_replace": 0, "norm_topk_prob": False}),
    "qwen3-tied": ("Qwen3", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
}
RUN = [f"model.seq_len={SEQ}", "train.global_batch_size=2", "train.micro_batch_size=2", "train.eval_every=1",
       "train.steps=10", "optimizer.lr=1e-2", "optimizer.warmup_steps=0", "optimizer.schedule=constant",
       "optimizer.eps=1e-3"]
MESHES = {"alone": [], "tp2-pp2": ["parallel.tp=2", "parallel.pp=2"]}


class Made(NamedTuple):
    folder: Path  # of transformers
    model: Any


@pytest.fixture(params=MODELS)
def made(request, tmp_path) -> Made:
    return make(request.param, tmp_path / "theirs")


def make(name: str, folder: Path, shard: str = "20KB", dtype: torch.dtype = torch.float32) -> Made:
    """A model of random weights, saved by transformers in several files."""
    kind, values = MODELS[name]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**values)
    cls = {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, cls)(config).to(dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms and biases, too, each its own
            weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if "norm" in name or "ln_" in name else 0.0))
        for name, bias in model.named_buffers():
            if name.endswith("correction_bias"):
                bias.copy_(torch.randn_like(bias) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return Made(folder, model)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(7))


def theirs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()[:, :-1]).logits.float()


def ours(config: Config, monkeypatch: pytest.MonkeyPatch, steps: int = 0, save: bool = False) -> torch.Tensor:
    """Logits of a run that resumes as its config says, [B, S, V], after some steps; all ranks in one process.
    `save`: whether it then saves a checkpoint."""
    seen: dict[int, torch.Tensor] = {}
    original = Context.cross_entropy

    def cross_entropy(self: Context, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen[self.group.rank()] = logits.detach().clone()
        return original(self, logits, labels)

    monkeypatch.setattr(Context, "cross_entropy", cross_entropy)
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        resumed = resume(config, engine.zero)
        assert resumed.path is not None
        for step in range(steps):
            engine.train_step(batches(config, comm, step))
        if save:
            saver = Saver(engine, Lineage(f"test-{config.world_size}"), lambda: None)
            saver.begin({"samples": 0, "skipped": 0, "wandb_id": None})
            outcome = saver.drain()
            assert outcome is not None and outcome.problem is None, outcome
        parts = tokens()
        engine.run("evaluate", lambda microbatch: Batch(
            parts[:, :-1], parts[:, 1:], torch.arange(2), config.train.seed, config.tokens_per_step, False))
        engine.close()

    run_loopback(plan, make_mesh(config), work)
    whole = torch.cat([seen[rank] for rank in sorted(seen)], -1)
    return whole.transpose(0, 1)[..., :VOCAB]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    error, size = float((one - other).abs().max()), float(other.abs().max())
    assert error <= 1e-5 * max(1.0, size), (error, size)


def config_of(run: Path, *overrides: str) -> Config:
    experts = "family: moe" in (run / "config.yaml").read_text() and "parallel.tp=2" in overrides
    more = ["parallel.sequence_parallel=true", "parallel.ep=2"] if experts else []
    return load(run / "config.yaml", [*RUN, *overrides, *more])


def test_logits_and_back(made, tmp_path, monkeypatch):
    """The same logits on one rank and on four, and a folder that is the same to the bit."""
    run = tmp_path / "run"
    import_model(made.folder, run, RUN[:1])
    want = theirs(made.model)
    for mesh in MESHES.values():
        close(ours(config_of(run, *mesh), monkeypatch), want)
    export_model(run, tmp_path / "back")
    same_files(made.folder, tmp_path / "back")


def same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "dots1"])
def test_as_transformers_holds_it_in_memory(name, tmp_path):
    """Stacked experts, which transformers writes where it is asked not to take them apart: the same
    checkpoint, and the files that transformers writes usually."""
    made = make(name, tmp_path / "theirs", "1GB")
    made.model.save_pretrained(tmp_path / "held", save_original_format=False)
    with safe_open(tmp_path / "held" / "model.safetensors", "pt") as file:
        assert any(key.endswith(".mlp.experts.gate_up_proj") for key in file.keys())  # noqa: SIM118
    sums = []
    for each in ("theirs", "held"):
        path = import_model(tmp_path / each, tmp_path / f"run-{each}", RUN[:1]).checkpoint
        sums.append({key: entry["sums"] for key, entry in manifest(path)["parameters"].items()})
        export_model(tmp_path / f"run-{each}", tmp_path / f"back-{each}")
        same_files(tmp_path / "theirs", tmp_path / f"back-{each}")
    assert sums[0] == sums[1]


def test_trained_on_two_meshes(made, tmp_path, monkeypatch):
    """Import, three steps on one mesh, one on another, export: transformers has the logits of the run."""
    run = tmp_path / "run"
    import_model(made.folder, run, RUN[:1])
    first = config_of(run, "parallel.dp=2", "parallel.tp=2", "zero.stage=3", "train.micro_batch_size=1")
    ours(first, monkeypatch, steps=3, save=True)
    second = config_of(run, "parallel.pp=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    got = ours(second, monkeypatch, steps=1, save=True)
    assert export_model(run, tmp_path / "back").step == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(model) is type(made.model)
    close(got, theirs(model))
    moved = (got - theirs(made.model)).abs().max()
    assert moved > 1e-2, "it was not trained"


@pytest.mark.parametrize("mesh", [
    [], ["parallel.tp=2", "parallel.pp=2", "zero.stage=3"]], ids=["alone", "mesh"])
@pytest.mark.parametrize("name", ["llama3", "mixtral", "qwen3-moe", "dots1", "dots1-groups"])
def test_gradients(name, mesh, tmp_path, monkeypatch):
    """A step of SGD moves every weight as a step of transformers' own gradients does."""
    made, run, rate = make(name, tmp_path / "theirs"), tmp_path / "run", 0.5
    import_model(made.folder, run, RUN[:1])
    config = config_of(run, *mesh, "optimizer.name=sgd", f"optimizer.lr={rate}", "optimizer.clip_grad=0",
                       "optimizer.weight_decay=0", *(["model.balance_weight=0"] if name != "llama3" else []))
    ours(config, monkeypatch, steps=1, save=True)
    export_model(run, tmp_path / "back")
    moved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    data = data_of(config, 0)
    logits = made.model(data.tokens_GS).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), data.labels_GS.flatten()).backward()
    for key, weight in made.model.named_parameters():
        change, grad = (weight - moved[key]).detach() / rate, weight.grad
        assert grad is not None
        assert (change - grad).abs().max() <= 1e-5 * grad.abs().max() + 1e-6, key


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_the_auxiliary_loss(name, tmp_path, monkeypatch):
    """The weight that an import gives it makes it that of transformers: of one layer and one sequence the
    gradients are equal, of more both balance over others."""
    kind, values = MODELS[name]
    monkeypatch.setitem(MODELS, name, (kind, {**values, "num_hidden_layers": 1, "output_router_logits": True,
                                              "router_aux_loss_coef": 0.7}))
    made, run, rate = make(name, tmp_path / "theirs"), tmp_path / "run", 0.5
    import_model(made.folder, run, RUN[:1])
    config = config_of(run, "train.global_batch_size=1", "train.micro_batch_size=1", "optimizer.name=sgd",
                       f"optimizer.lr={rate}", "optimizer.clip_grad=0", "optimizer.weight_decay=0")
    ours(config, monkeypatch, steps=1, save=True)
    export_model(run, tmp_path / "back")
    moved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    data = data_of(config, 0)
    out = made.model(data.tokens_GS)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), data.labels_GS.flatten())
    (loss + 0.7 * out.aux_loss).backward()
    router = next(weight for key, weight in made.model.named_parameters() if key.endswith("gate.weight"))
    change = (router - moved["model.layers.0.mlp.gate.weight"]).detach() / rate
    assert router.grad is not None
    assert (change - router.grad).abs().max() <= 1e-5 * router.grad.abs().max() + 1e-6


def test_groups_of_experts_limit_the_choice(tmp_path):
    """Of the model with which logits and gradients are compared: without groups it computes others."""
    model = make("dots1-groups", tmp_path / "theirs").model
    limited = theirs(model)
    for each in model.modules():
        if hasattr(each, "topk_group"):
            each.num_group = each.topk_group = 1
    assert (theirs(model) - limited).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "llama3-tied", "qwen2", "qwen3-tied", "qwen3", "mixtral", "dots1"])
def test_an_export_loads_strictly(name, dtype, tmp_path, monkeypatch):
    """In shards: no tensor is missing, left over or twice, ties hold, and the dtype asked is the one that
    transformers finds."""
    monkeypatch.setattr(exporting, "SHARD", 20_000)
    made = make(name, tmp_path / "theirs")
    import_model(made.folder, tmp_path / "run", RUN[:1])
    done = export_model(tmp_path / "run", tmp_path / "back", dtype)
    assert sum(each.endswith(".safetensors") for each in done.files) > 1
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype="auto", output_loading_info=True)
    assert not any(found.values()), found
    tied = made.model.get_output_embeddings().weight is made.model.get_input_embeddings().weight
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    asked = DTYPES[NAMES[dtype]]
    assert {each.dtype for each in model.parameters()} == {asked} and model.config.dtype == asked
    for key, value in made.model.state_dict().items():
        wide = key.endswith("correction_bias")  # of a router: always fp32
        assert torch.equal(model.state_dict()[key], value if wide else value.to(asked)), key


def test_what_llama_toy_trains_goes_out(tmp_path, monkeypatch):
    """transformers has the logits of a run of configs/llama-toy.yaml; the toy's refusal names that config."""
    few = [f"run.dir={tmp_path / 'run'}", f"model.seq_len={SEQ}", "train.steps=3",
           "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_every=1",
           "data.source=/nowhere"]
    config = load("configs/llama-toy.yaml", few)
    saved_after(config, 2)
    done = export_model(tmp_path / "run", tmp_path / "out")
    assert done.family == "llama" and done.step == 2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    alone = load("configs/llama-toy.yaml", [*few, "parallel.dp=1", "train.global_batch_size=2"])
    close(ours(alone, monkeypatch), theirs(model)[..., :VOCAB])
    saved_after(load("configs/toy.yaml", [f"run.dir={tmp_path / 'toy'}", *few[1:], "model.layers=2"]), 1)
    with pytest.raises(InputError, match=r"configs/llama-toy\.yaml is a small model"):
        export_model(tmp_path / "toy", tmp_path / "no")


@pytest.mark.parametrize("more", [[], ["parallel.sequence_parallel=true", "parallel.pp=2"]], ids=["tp", "sp"])
def test_a_long_sequence_on_eight_ranks(more, tmp_path, monkeypatch):
    """Ranks of cp share it, and those of tp the heads: logits of every token, and the loss."""
    seq = 512
    kind, values = MODELS["llama3"]
    monkeypatch.setitem(MODELS, "llama3", (kind, {**values, "max_position_embeddings": seq}))
    made, run = make("llama3", tmp_path / "theirs"), tmp_path / "run"
    import_model(made.folder, run, [f"model.seq_len={seq}"])
    config = load(run / "config.yaml", [*RUN, f"model.seq_len={seq}", "parallel.cp=4", "parallel.tp=2",
                                        *more])
    parts = torch.randint(0, VOCAB, (2, seq + 1), generator=torch.Generator().manual_seed(7))
    seen: dict[tuple[int, int], torch.Tensor] = {}
    original = Context.cross_entropy

    def cross_entropy(self: Context, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen[self.group.rank(), self.tokens[0]] = logits.detach().clone()
        return original(self, logits, labels)

    monkeypatch.setattr(Context, "cross_entropy", cross_entropy)

    def work(comm: Comm) -> float:
        engine = Engine(Analysis(make_plan(config)), comm)
        resume(config, engine.zero)
        return engine.run("evaluate", lambda microbatch: Batch(
            parts[:, :-1], parts[:, 1:], torch.arange(2), 0, config.tokens_per_step, False))[0].loss

    losses = run_loopback(make_plan(config), make_mesh(config), work)
    by_rank = [torch.cat([seen[tp, cp] for tp in range(2)], -1).transpose(0, 1) for cp in range(4)]
    got = in_order(by_rank, [zigzag(seq, 4)], 1)[..., :VOCAB]
    with torch.no_grad():
        want = made.model(parts[:, :-1]).logits
    close(got, want)
    loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), parts[:, 1:].flatten())
    assert losses == pytest.approx([float(loss)] * len(losses), rel=1e-5)

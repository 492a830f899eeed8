"""Models with experts from files with a tensor an expert, and from files with one of all experts: the same
weights, one expert in memory at a time, and what is missing by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.loopback.test_checkpoint import manifest
from tests.loopback.test_experts import moe
from tests.loopback.test_hugging_face_files import HERE, LLAMA, change, folder, refused, same
from threed.base.errors import InputError
from threed.interop.hf import source as trained
from threed.interop.hf import tensors
from threed.interop.hf.config import family_of, values_of
from threed.interop.hf.exporting import export_model
from threed.interop.hf.fitting import family_for
from threed.interop.hf.importing import import_model

X, F = 4, 24  # experts, hidden layer of one
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": X, "num_experts_per_tok": 2},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": X, "num_experts_per_tok": 2,
                  "moe_intermediate_size": F, "norm_topk_prob": True},
    "dots1": {"architectures": ["Dots1ForCausalLM"], "n_routed_experts": X, "num_experts_per_tok": 2,
              "moe_intermediate_size": F, "n_shared_experts": 1, "first_k_dense_replace": 1}}
NAMES = {kind: ("mlp", "gate_proj", "up_proj", "down_proj") for kind in KINDS} | {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2")}


def described(kind: str) -> dict[str, Any]:
    return {**LLAMA, "model_type": kind, **KINDS[kind]}


def stacked(kind: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as transformers has them in memory."""
    block, gate, up, down = NAMES[kind]
    values = dict(values)
    for layer in range(LLAMA["num_hidden_layers"]):
        theirs, ours = (f"model.layers.{layer}.{name}" for name in (block, "mlp"))
        if f"{theirs}.experts.0.{down}.weight" not in values:
            continue
        each = [[values.pop(f"{theirs}.experts.{x}.{name}.weight") for name in (gate, up, down)]
                for x in range(X)]
        values[f"{ours}.gate.weight"] = values.pop(f"{theirs}.gate.weight")
        values[f"{ours}.experts.gate_up_proj"] = torch.stack([torch.cat([g, u]) for g, u, _ in each])
        values[f"{ours}.experts.down_proj"] = torch.stack([d for *_, d in each])
    return values


def both(tmp_path: Path, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """A model in files of either kind."""
    apart = folder(tmp_path / "apart", described(kind), dtype)
    values = load_file(apart / "model.safetensors")
    for name in [name for name in values if name.endswith("correction_bias")]:
        values[name] = values[name].float() + 1e-3  # as transformers keeps it
    save_file(values, apart / "model.safetensors", {"format": "pt"})
    together = folder(tmp_path / "together", described(kind), dtype)
    save_file(stacked(kind, values), together / "model.safetensors", {"format": "pt"})
    return apart, together


def sums(path: Path) -> dict[str, str]:
    return {name: entry["sums"]["param"] for name, entry in manifest(Path(path))["parameters"].items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_stacked_experts_are_the_same_weights(kind, dtype, tmp_path):
    """Both files are imported alike, and exported as a tensor an expert: names, dtypes and bits."""
    apart, together = both(tmp_path, kind, dtype)
    one, other = (import_model(each, tmp_path / f"run-{each.name}") for each in (apart, together))
    assert sums(one.checkpoint) == sums(other.checkpoint)
    assert not any("experts are stacked" in note for note in one.notes)
    assert any("mlp.experts.gate_up_proj: an export" in note for note in other.notes)
    for each in (apart, together):
        export_model(tmp_path / f"run-{each.name}", tmp_path / f"back-{each.name}")
    same(apart, tmp_path / "back-apart")
    was, now = (load_file(path / "model.safetensors") for path in (apart, tmp_path / "back-together"))
    assert was.keys() == now.keys()
    assert all(was[name].dtype == now[name].dtype and torch.equal(was[name], now[name]) for name in was)


@pytest.mark.parametrize("was", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_biases_of_routers_are_exact(was, dtype, tmp_path):
    """They are fp32, whatever the dtype of the import was, of compute is, and of the export is to be."""
    source, bias = both(tmp_path, "dots1", was)[0], "model.layers.1.mlp.gate.e_score_correction_bias"
    values = {**load_file(source / "model.safetensors"), bias: torch.arange(1.0, 1.0 + X) + 1e-6}
    values[bias][0] = 1e5  # too large for 16 bits of fp16
    save_file(values, source / "model.safetensors", {"format": "pt"})
    import_model(source, tmp_path / "run", ["precision.dtype=fp16"])
    export_model(tmp_path / "run", tmp_path / "out", dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written[bias], values[bias]) and written[bias].dtype == torch.float32
    others = {value.dtype for name, value in written.items() if not name.endswith("correction_bias")}
    assert others == {tensors.DTYPES[tensors.NAMES[dtype]]}


def test_stacked_experts_in_several_files_without_a_prefix(tmp_path):
    apart, together = both(tmp_path, "qwen3_moe")
    values = {name.removeprefix("model."): value
              for name, value in load_file(together / "model.safetensors").items()}
    (together / "model.safetensors").unlink()
    parts = [dict(list(values.items())[first::2]) for first in (0, 1)]
    for index, each in enumerate(parts):
        save_file(each, together / f"model-{index + 1:05d}-of-00002.safetensors")
    one, other = (import_model(each, tmp_path / f"run-{each.name}") for each in (apart, together))
    assert sums(one.checkpoint) == sums(other.checkpoint)


class Held(TorchDispatchMode):
    """The most bytes of tensors at a time, of those that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.largest = 0, 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {key: (ref, size) for key, (ref, size) in self._alive.items() if not ref.expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result


@pytest.mark.parametrize("files", ["apart", "together"])
def test_one_expert_is_in_memory_at_a_time(files, tmp_path, monkeypatch):
    """Of a block's experts, which are most of this model, one, and pieces of it in the dtype of a file."""
    monkeypatch.setattr(tensors, "PIECE", 256)
    monkeypatch.setattr(trained, "PIECE", 256)
    config = {**described("qwen3_moe"), "num_experts": 64, "moe_intermediate_size": 64, "vocab_size": 16}
    monkeypatch.setattr(f"{__name__}.X", 64)
    source = folder(tmp_path / "apart", config)
    if files == "together":
        values = stacked("qwen3_moe", load_file(source / "model.safetensors"))
        save_file(values, source / "model.safetensors", {"format": "pt"})
    expert = 4 * 2 * 64 * LLAMA["hidden_size"]  # bytes of gate and up
    for work in (lambda: import_model(source, tmp_path / "run"),
                 lambda: export_model(tmp_path / "run", tmp_path / "back")):
        with Held() as held:
            work()
        assert held.largest == expert and held.most < 1.5 * expert, (held.largest / expert,
                                                                     held.most / expert)


# ---------------------------------------------------------------- what is missing


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_that_is_missing_is_named_with_its_file(kind, tmp_path):
    source, (block, *_, down) = folder(tmp_path / "theirs", described(kind)), NAMES[kind]
    lost = f"model.layers.1.{block}.experts.2.{down}.weight"
    change(source, **{lost: None})
    refused(source, tmp_path / "run", f"{lost} is missing in model.safetensors: take it and config.json from")


def test_an_expert_is_missing_in_the_file_of_the_index(tmp_path):
    source = folder(tmp_path / "theirs", described("mixtral"))
    values = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    lost, halves = list(values)[-5], [dict(list(values.items())[first::2]) for first in (0, 1)]
    places = {}
    for name, half in zip(("a.safetensors", "b.safetensors"), halves, strict=True):
        places |= dict.fromkeys(half, name)
        save_file({key: value for key, value in half.items() if key != lost}, source / name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refused(source, tmp_path / "run", f"{lost} is missing in {places[lost]}: fetch that file again")


def test_stacked_experts_of_another_shape_and_twice(tmp_path):
    apart, together = both(tmp_path, "mixtral")
    values = load_file(together / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for wrong in (values[name][:3], values[name].transpose(1, 2)):
        save_file({**values, name: wrong.contiguous()}, together / "model.safetensors")
        refused(together, tmp_path / "run", f"{name} has the shape {list(wrong.shape)}, not [4, 48, 16]")
    expert = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    save_file({**values, expert: load_file(apart / "model.safetensors")[expert]},
              together / "model.safetensors")
    refused(together, tmp_path / "run", f"{expert} has no place")


# ---------------------------------------------------------------- what threed does not have


@pytest.mark.parametrize("changes, words", [
    ({"kv_lora_rank": 512}, "kv_lora_rank=512: threed has no latent attention (MLA); import another model"),
    ({"q_lora_rank": 1536}, "q_lora_rank=1536: threed has no latent attention"),
    ({"shared_expert_intermediate_size": 64}, "_size=64: threed has no gate of the shared"),
    ({"qk_norm_type": "per_layer"}, "=per_layer: threed has no norms of queries and keys over all"),
    ({"swiglu_limit": 7.0}, "swiglu_limit=7.0: threed has no clamped SwiGLU"),
    ({"mlp_bias": True}, "mlp_bias=True: threed has no biases of MLPs alone"),
    ({"expert_bias": True}, "expert_bias=True: threed has no biases of experts"),
    ({"model_type": "gpt_oss", "swiglu_limit": 7.0}, "model_type=gpt_oss is a model that threed does not "
     "have, with attention sinks, clamped SwiGLU (swiglu_limit=7.0), biases of experts; import one of"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "with latent attention (MLA) (kv_lora_rank=512)"),
    ({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}, "with gate of the shared"),
    ({"model_type": "olmoe"}, "with norms of queries and keys over all heads; import one of gpt2, llama"),
])
def test_what_threed_does_not_have_is_refused_by_name(changes, words):
    for kind in KINDS:
        config = {**described(kind), **changes}
        with pytest.raises(InputError, match=re.escape(words)):
            values_of(family_of(config, HERE), config, HERE)


def test_groups_of_experts_by_another_rule():
    """transformers adds up the two best scores of a group; with other numbers of experts of a token the
    choices would differ, in either direction."""
    groups = {**described("dots1"), "n_routed_experts": 16, "n_group": 4, "topk_group": 2}
    for k, chosen, agrees in ((4, 2, True), (6, 2, False), (2, 1, True), (4, 4, False)):
        config = {**groups, "num_experts_per_tok": k, "topk_group": chosen}
        family = family_of(config, HERE)
        model = moe("model.experts=16", f"model.experts_per_token={k}", "model.expert_groups=4",
                    f"model.groups_per_token={chosen}", "model.router_score=sigmoid", "model.balance=bias",
                    "model.qk_norm=true", "model.shared_expert_ffn=24", "model.tie_embeddings=false").model
        if agrees:
            values, notes = values_of(family, config, HERE)
            assert (values["expert_groups"], values["groups_per_token"]) == (4, chosen)
            assert not any("does not know" in note for note in notes)
            assert family_for(model, None).model_type == "dots1"
            continue
        with pytest.raises(InputError, match=rf"num_experts_per_tok={k}, n_group=4, topk_group={chosen}: in "
                                             rf"dots1 .* best 2, and in threed as its best {k // chosen}, "):
            values_of(family, config, HERE)
        with pytest.raises(InputError, match=r"A dots1 .*\n  - model.groups_per_token=a number of groups "
                                             r"that have 2 experts of a token each, not \d$"):
            family_for(model, None)


def test_keys_that_are_off_are_no_news():
    """As in published configs of Qwen 3 MoE."""
    config = {**described("qwen3_moe"), "shared_expert_intermediate_size": 0, "swiglu_limit": None,
              "kv_lora_rank": None, "mlp_bias": False}
    _, notes = values_of(family_of(config, HERE), config, HERE)
    assert not any("does not know" in note for note in notes), notes


@pytest.mark.parametrize("name, shape, words", [
    ("mlp.shared_expert_gate.weight", (1, 16), "no gate of the shared expert"),
    ("self_attn.sinks", (4,), "no attention sinks"),
    ("self_attn.kv_a_proj_with_mqa.weight", (8, 16), "no latent attention (MLA)"),
    ("mlp.experts.2.gate_proj.bias", (F,), "no biases of experts"),
    ("mlp.experts.gate_up_proj_bias", (X, 2 * F), "no biases of experts"),
    ("self_attn.q_norm.weight", (16,), "shape [16], not [4]: threed has no norms of queries and keys")])
def test_tensors_of_what_threed_does_not_have(name, shape, words, tmp_path):
    source = folder(tmp_path / "theirs", described("qwen3_moe"))
    change(source, **{f"model.layers.1.{name}": torch.zeros(shape)})
    refused(source, tmp_path / "run", name, words)


def test_another_number_of_experts(tmp_path):
    """What answers config.json is said, and does."""
    source = folder(tmp_path / "theirs", described("qwen3_moe"))
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "num_experts": X // 2}))
    refused(source, tmp_path / "run", f"if it has {X} experts, give model.experts={X}")
    import_model(source, tmp_path / "run", [f"model.experts={X}"])

"""The section `model`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from threed.base.errors import InputError
from threed.base.paths import of_family
from threed.base.quantity import parse_bytes, round_up
from threed.schema.keys import key


def _tile_linears(value: str) -> Iterator[str]:
    """What is wrong: how the message goes on after the key."""
    try:
        parse_bytes(value)
    except InputError as error:
        yield f": {error}"


@dataclass
class ModelConfig:
    """Sizes of the model. A named size (`name`, threed/models/families) gives other defaults."""

    family: str = key("gpt", "gpt | llama, or one of your own: package.module:name or file.py:name",
                      path=of_family)
    name: str = key("custom", "custom, or a size: gpt2-small, llama3.1-8b ...; keys beside it win over it, "
                    "but on the command line it wins over the file's")
    layers: int = key(8, "transformer blocks", least=1)
    hidden: int = key(128, "width of the residual stream", least=1)
    heads: int = key(8, "attention heads", least=1)
    kv_heads: int | None = key(None, "null: as many as heads", least=1)
    head_dim: int | None = key(None, "numbers of a head; null: hidden / heads", least=1)
    ffn_hidden: int | None = key(None, "null: 4 x hidden (gelu), or 8/3 x hidden rounded up to 64 (swiglu)",
                                 least=1)
    vocab: int = key(1024, "tokens of the tokenizer", least=2)
    vocab_multiple: int = key(128, "the vocabulary is padded to a multiple of this; padded logits are "
                              "masked", least=1, free=True)
    seq_len: int = key(128, "tokens of a sequence", least=1)
    position: str = key("rotary", choices={
        "rotary": "turns halves of a head, as GPT-NeoX, not pairs, as GPT-J", "learned": ""})
    rope_theta: float = key(10000.0, "base of the rotary frequencies", above=0)
    rope_scaling: list[float] | None = key(
        None, "Llama 3's: [factor, low_freq_factor, high_freq_factor, tokens of the sequences before], such "
        "as [8, 1, 4, 8192]; null: none")
    norm: str = key("layernorm", choices=("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "added to the variance in a norm", above=0)
    activation: str = key("gelu", choices=("gelu", "swiglu"))
    bias: bool = key(True, "biases of linear layers")
    qkv_bias: bool | None = key(None, "biases of queries, keys and values; null: what bias is")
    qk_norm: bool = key(False, "an RMS norm of each head's queries, and one of its keys, before rotary "
                        "positions")
    dropout: float = key(0.0, "after the embedding and on each residual branch", least=0, below=1,
                         free=True)
    attention_dropout: float = key(0.0, "on attention weights; above 0 attention runs unfused", least=0,
                                   below=1, free=True)
    init_std: float = key(0.02, "standard deviation of initial weights", least=0, free=True)
    tie_embeddings: bool = key(True, "the head's output matrix is the word embedding")
    fused: str = key(
        "auto", "SwiGLU, rotary positions, dropout, RMS norm and the loss keep less for backward",
        choices={"off": "", "auto": "compiled on a GPU that has a compiler; off where run.device=cpu",
                 "on": "always compiled"}, free=True)
    loss_chunk: int | None = key(None, "tokens whose logits are in fp32 at a time; null: all of a "
                                 "micro-batch", least=1, free=True)
    tile_linears: str | None = key(
        None, "most bytes of linear layers that a unit gathers, such as 64MiB: larger ones become tiles",
        check=_tile_linears, free=True)
    lora_rank: int | None = key(None, "LoRA: all weights are frozen, and adapters of this rank are "
                                "trained; null: off", least=1, free=True)
    lora_alpha: float | None = key(
        None, "what adapters add is multiplied by lora_alpha / lora_rank; null: lora_rank", above=0,
        free=True)
    lora_targets: list[str] | None = key(
        None, "linears with adapters, by PEFT's names: q_proj, k_proj, v_proj, qkv_proj (one for all three, "
        "as GPT-2's c_attn), o_proj, gate_proj, up_proj, down_proj; null: q_proj, v_proj", free=True)

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

    seq_len: int = key(1, "each sample counts as one", least=1)
    tie_embeddings: bool = key(False, "no weights are shared")
    own_layers = True

"""Parameter counts and work of the registry's models, against published numbers and closed formulas."""

from __future__ import annotations

import math

import pytest

from threed.base.errors import ConfigError, InputError
from threed.config.load import load
from threed.interop import init
from threed.models.families.registry import sizes
from threed.models.model import layers, model_flops, own_parameters, parameters, tied_parameters

# Counted from the published checkpoints' shapes, or for GPT-3 and the 1T model by the papers' formulas.
SIZES = sizes()
PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328, "megatron-1t": 1_008_038_758_400, "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248, "llama3.1-70b": 70_553_706_496, "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "dots.llm1": 142_774_373_888,
}


def parameter_count(model, padded: bool = False) -> int:
    """Parameters of the whole model, tied ones once; with or without the rows that pad the vocabulary."""
    return sum(parameter.numel if padded or parameter.unpadded is None
               else parameter.numel * parameter.unpadded // parameter.shape[0]
               for parameter in parameters(model) if not parameter.counted)


def model_of(name: str, *overrides: str):
    return load(None, [f"model.name={name}", *overrides]).model


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    """A named model that has not the size of that model."""
    assert parameter_count(model_of(name)) == PUBLISHED[name]


def test_every_size_has_a_published_count():
    assert {name for name in SIZES if not name.startswith("gpt3")} <= PUBLISHED.keys()


@pytest.mark.parametrize("written, size", [
    ("Llama3-8B", "llama3-8b"), ("llama3.1-8b", "llama3.1-8b"), ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
    ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"), ("llama3.2_1b", "llama3.2-1b"),
    ("llama 3.2 3B", "llama3.2-3b"), ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
    ("Qwen/Qwen2.5-7B", "qwen2.5-7b"), ("qwen2.5-7b-instruct", "qwen2.5-7b"),
    ("qwen2.5:0.5b", "qwen2.5-0.5b"),
    ("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"), ("QWEN3-32B", "qwen3-32b"), ("gpt2", "gpt2-small"),
    ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"), ("openai-community/gpt2-xl", "gpt2-xl")])
def test_names_as_people_write_them(written, size):
    model = load(None, [f"model.name={written}"]).model
    assert model == model_of(size) and model.name == size


@pytest.mark.parametrize("written, words", [
    ("Qwen/Qwen2.5-8B", "did you mean qwen2.5-"), ("mistral-7b", "did you mean mistral-7b-v0.3"),
    ("mistralai/Mistral-7B-v0.1", "v0.1 has a sliding window"),
    ("llama3.1-13b", "did you mean llama3."), ("Qwen3-4B-Instruct-2507", "did you mean qwen3-4b"),
    ("llama", "did you mean llama"), ("/", "no such size. There are"), ("gpt-neo", "no such size. There"),
    ("gpt-j-6b", "no such size. There are"), ("deepseek-v3", "no such size. There are"),
    ("a", "no such size. There are"), ("30b", "did you mean qwen3-30b-a3b?"),
    ("8b", "did you mean llama3-8b, llama3.1-8b or qwen3-8b?"), ("8x22b", "did you mean mixtral-8x22b?"),
    ("mixtral", "did you mean mixtral-8x7b or mixtral-8x22b?"), ("small", "did you mean gpt2-small or gpt3-"),
    ("moe", "did you mean mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b or qwen3-235b-a22b?"),
    ("qwen3-moe", "did you mean qwen3-30b-a3b or qwen3-235b-a22b?"),
    ("toy-moe", "configs/toy-moe.yaml is a config of one"), ("lama3-8b", "did you mean llama3-8b")])
def test_names_that_are_none(written, words):
    with pytest.raises(ConfigError) as caught:
        load(None, [f"model.name={written}"])
    assert words in str(caught.value)
    with pytest.raises(InputError) as asked:
        init.model_of(written)
    assert words in str(asked.value)


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith(("gpt", "megatron"))])
def test_gpt_formula(name):
    """12 l h^2 + 13 l h for the blocks, (V + s) h for the embeddings, 2 h for the last norm."""
    m = model_of(name)
    blocks = 12 * m.layers * m.hidden**2 + 13 * m.layers * m.hidden
    ends = (m.vocab + m.seq_len + 2) * m.hidden
    assert parameter_count(m) == blocks + ends
    assert parameter_count(m, padded=True) == blocks + ends + (m.padded_vocab - m.vocab) * m.hidden


def test_untied_and_swiglu():
    """An output projection that is counted twice or never; a swiglu MLP without its gate."""
    m = model_of("gpt2-small", "model.tie_embeddings=false")
    assert parameter_count(m) == PUBLISHED["gpt2-small"] + m.vocab * m.hidden
    assert tied_parameters(layers(m)) == ()
    m = load(None, ["model.activation=swiglu", "model.bias=false", "model.norm=rmsnorm",
                    "model.kv_heads=2"]).model
    h, kv, ffn = m.hidden, 2 * m.head_size, m.num_ffn_hidden
    assert ffn == 384 and (h, kv) == (128, 32)  # 8/3 x 128 = 341.3, up to a multiple of 64
    assert parameter_count(m) == m.layers * (2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h) + h + m.vocab * h


def test_names_are_unique():
    """Two parameters of one name share their initial values and overwrite each other in a checkpoint."""
    for name in ("gpt2-small", "llama3-8b"):
        names = [p.name for layer in layers(model_of(name)) for p in own_parameters(layer)]
        assert len(set(names)) == len(names)
        assert not {tied.name for tied in tied_parameters(layers(model_of(name)))} & set(names)


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith(("gpt", "megatron"))])
def test_flops_formula(name):
    """Narayanan et al. 2021 without recomputation: 72 B s l h^2 (1 + s/(6h) + V/(12 l h)), V padded;
    exact."""
    m, batch = model_of(name), 3
    s, n, h, v = m.seq_len, m.layers, m.hidden, m.padded_vocab
    assert model_flops(m,
                       batch) == 72 * batch * s * n * h**2 + 12 * batch * s**2 * n * h + 6 * batch * s * h * v
    factor = 1 + s / (6 * h) + v / (12 * n * h)
    assert model_flops(m, batch) == pytest.approx(72 * batch * s * n * h**2 * factor, 1e-12)


def test_flops_of_grouped_queries_and_swiglu():
    """6 FLOPs a weight of a matrix and token, and 12 l h s a token for attention, whatever the matrices'
    shapes."""
    m = model_of("llama3-8b", "model.seq_len=1024")
    matrices = sum(p.numel for layer in layers(m) for p in own_parameters(layer) if p.decay
                   and "embedding" not in p.name)
    assert model_flops(m, 1) == 6 * 1024 * matrices + 12 * m.layers * m.hidden * 1024**2


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_local_shapes_add_up(tp):
    """A part that is lost or held twice when tp cuts a parameter."""
    for name in ("gpt3-175b", "llama3-8b"):
        for layer in layers(model_of(name)):
            for p in own_parameters(layer):
                (_, shape), last = p.part({"tp": tp}, {"tp": 0}), p.part({"tp": tp}, {"tp": tp - 1})
                assert tuple(at + size for at, size in zip(*last)) == p.stored
                assert math.prod(shape) * (tp if p.axes else 1) == p.numel == math.prod(p.shape)

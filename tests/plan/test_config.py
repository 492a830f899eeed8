"""Every bad config gets one message that names all of its problems; nothing is coerced in silence."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from threed.base.errors import ConfigError, InputError
from threed.config import validate as subject
from threed.config.load import ConfigSource, for_devices, known_keys, load
from threed.config.stages import stage_runs
from threed.config.unknown import UnknownKey
from threed.config.validate import warnings
from threed.config.values import check_values
from threed.models.families.registry import sizes
from threed.models.tiling import cut_layers
from threed.schema import Config, KeySpec, ModelConfig, ParallelConfig, key, keys_of

ROOT = Path(__file__).parents[2]


def refused(*overrides: str, world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(None, list(overrides), world_size)
    sections = Config().to_dict()
    assert all(each.section in sections or isinstance(each, UnknownKey) for each in caught.value.problems)
    lines = list(map(str, caught.value.problems))
    assert caught.value.status == 2 and all(line in str(caught.value) for line in lines)
    return lines


def one(*overrides: str, world_size: int | None = None) -> str:
    problems = refused(*overrides, world_size=world_size)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize("key, nearest", [
    ("model.layer", "model.layers"), ("modle.layers", "model.layers"), ("hiden", "model.hidden"),
    ("optimiser.lr", "optimizer.lr"), ("train.optimizer.lr", "optimizer.lr"), ("parallel.zero", None),
    ("train.lr", "optimizer.lr"), ("optimizer.warmup", "optimizer.warmup_steps"),
    ("train.global_batch", "train.global_batch_size")])
def test_unknown_key(key, nearest):
    """A misspelt key that is ignored: another model is trained than the one asked for."""
    problem = one(f"{key}=3")
    assert problem.startswith(f"{key}: unknown key")
    assert nearest is None or problem.endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize("key, instead", [
    ("parallel.tensor_model_parallel_size", "parallel.tp"), ("model.num_attention_heads", "model.heads"),
    ("num-query-groups", "model.kv_heads"), ("model.swiglu", "model.activation=swiglu"),
    ("--lr-warmup-iters", "optimizer.warmup_steps"), ("num_layers", "model.layers")])
def test_key_of_megatron(key, instead):
    """The nearest of threed's names is far from the one that is meant."""
    assert one(f"{key}=3") == f"{key}: unknown key; for Megatron-LM's {key} use {instead}"


@pytest.mark.parametrize("words, said", [
    ("train.batch_size batch_size bs model.batch", "train.micro_batch_size (of one forward)"),
    ("epochs train.num_epochs optimizer.epochs", "use train.steps; an epoch has"),
    ("max_steps train.max_steps train.max_iters", "use train.steps"),
    ("gpus parallel.devices run.num_gpus world_size parallel.gpus", "that only plan take --devices N"),
    ("nodes parallel.num_nodes", "NNODES, NODE_RANK and MASTER_ADDR"),
    ("parallel.cp_size parallel.context_parallel cp", "use parallel.cp"),
    ("model.experts model.expert_ffn_hidden model.moe_capacity", "it is a key of model.family=moe"),
    ("parallel.ep_size model.ep_size", "use parallel.ep, with model.family=moe"),
    ("model.moe model.use_moe", "use model.family=moe, whose keys are"),
    ("model.n_layer model.n_layers n_layer model.depth", "use model.layers"),
    ("model.d_model n_embd model.dim model.embed_dim", "use model.hidden"),
    ("model.n_head n_heads", "model.heads"), ("model.block_size train.max_seq_len n_ctx", "model.seq_len"),
    ("model.n_vocab vocabulary", "use model.vocab"), ("optimizer.learning_rate train.max_lr", "optimizer.lr"),
    ("data.dataset dataset data_path", "data.source"), ("checkpoint.save_every", "use checkpoint.every"),
    ("log_every train.log_freq", "use monitor.console_every"), ("log_dir run.log_dir", "use run.dir"),
    ("nproc_per_node train.num_processes", "that only plan take --devices N"),
    ("nnodes parallel.nnodes", "NNODES, NODE_RANK")])
def test_words_of_newcomers(words, said):
    """The commonest words, in any section or none: the right key, or that there is no such thing."""
    problems = refused(*(f"{key}=3" for key in words.split()))
    assert len(problems) == len(words.split()) and all(said in problem for problem in problems), problems


def test_a_list_of_numbers():
    assert one("optimizer.betas=0.9,0.95") == ("optimizer.betas=0.9,0.95: must be a list of numbers, such as "
                                               "[0.9,0.95]")
    assert one("parallel.stage_units=3").endswith("must be a list of whole numbers, such as [4,4]")
    assert one("train.sample_prompts=hello").endswith("must be a list, such as [one,two]")


@pytest.mark.parametrize("key", [
    "parallel.speed", "model.colour", "model.thing", "checkpoint.cloud"])
def test_no_far_suggestion(key):
    assert one(f"{key}=3") == f"{key}: unknown key; the keys are listed in configs/reference.yaml"


def test_a_value_for_a_section():
    assert one("train=5") == ("train=5: train is a section; give values to its keys, such as "
                              "train.steps")


@pytest.mark.parametrize("override", [
    "model.layers=abc", "model.layers=2.5", "model.layers=true", "model.layers=null", "model.layers=[1]",
    "optimizer.lr=abc", "optimizer.lr=true", "optimizer.betas=0.9", "optimizer.betas=[0.9,x]",
    "model.bias=maybe",
    "model.bias=3", "model.qk_norm=2", "model.qkv_bias=some", "model.head_dim=a", "model.rope_scaling=8",
    "parallel.dp=2.5", "parallel.dp=true", "parallel.dp=some", "parallel.stage_units=[1,x]",
    "parallel.stage_units=3", "run.dir=null", "model=3"])
def test_wrong_type(override):
    """A value of the wrong type that is coerced."""
    assert one(override).startswith(override.split("=")[0])


@pytest.mark.parametrize("override", [
    "optimizer.lr=nan", "optimizer.lr=-1", "optimizer.clip_grad=nan", "optimizer.eps=-1e-8",
    "optimizer.betas=[0.9]",
    "optimizer.betas=[nan,0.9]", "optimizer.betas=[0.9,1.0]", "optimizer.weight_decay=-0.1",
    "optimizer.min_lr=1",
    "model.dropout=nan", "model.dropout=1", "model.init_std=-1", "model.layers=0", "model.vocab=1",
    "train.steps=-1",
    "train.micro_batch_size=0", "run.timeout_s=nan", "run.timeout_s=0", "data.validation_fraction=1",
    "parallel.tp=0",
    "parallel.dp=0", "parallel.dp=-2", "parallel.pp=-1", "parallel.axis_order=tp-dp",
    "parallel.axis_order=pp-dp-dp",
    "model.norm=batchnorm", "optimizer.name=adagrad", "precision.dtype=fp8", "zero.stage=7",
    "run.device=tpu"])
def test_impossible_value(override):
    """A value with which the run would fail, or worse, go on."""
    assert override.split("=")[0] in one(override)


@pytest.mark.parametrize("override", [
    "model.norm_eps=-1", "model.norm_eps=nan", "model.rope_theta=0", "model.rope_theta=nan",
    "monitor.peak_tflops=-5",
    "optimizer.lr=inf", "model.init_std=inf"])
def test_value_that_makes_nan(override):
    """A model that is NaN from the first step, or a utilisation below zero."""
    assert override.split("=")[0] in one(override)


@pytest.mark.parametrize("override, meant", [
    ("parallel.schedule=1F1B", "1f1b"), ("parallel.schedule=Interleaved1F1B", "interleaved"),
    ("precision.dtype=bfloat16", "bf16"), ("optimizer.name=Adam", "adamw"),
                                             ("model.position=rope", "rotary")])
def test_values_of_others(override, meant):
    """A value that others call by another name, or write in capitals."""
    assert one(override).endswith(f"; did you mean {meant}?")


def test_toml(tmp_path):
    """torchtitan's TOML: each key is answered with ours."""
    path = tmp_path / "job.toml"
    path.write_text("[parallelism]\ntensor_parallel_degree = 2\n[training]\nseq_len = 128\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert [problem.rpartition(" use ")[2].split(" ")[0] for problem in map(str, caught.value.problems)] == [
        "parallel.tp", "model.seq_len"]
    path.write_text("[parallelism")
    with pytest.raises(InputError, match="cannot be read as TOML"):
        load(path)


def test_open_number_of_ranks(tmp_path):
    """A config for 64 GPUs that is checked for 8 without a word."""
    path = tmp_path / "c.yaml"
    path.write_text("parallel: {tp: 2}\n")
    assert ConfigSource.read(path).leaves_dp and ConfigSource.read(path, ["parallel.dp=auto"]).leaves_dp
    assert not ConfigSource.read(path, ["parallel.dp=4"]).leaves_dp
    assert not ConfigSource.read("configs/toy.yaml").leaves_dp


def test_world_size():
    """Degrees whose product is not the number of processes would hang at the first collective."""
    problem = one("parallel.dp=2", "parallel.tp=2", "parallel.pp=2", world_size=6)
    assert problem == ("parallel.dp=2 x tp=2 x pp=2 = 8 processes, but the world size is 6, which tp x pp = "
                       "4 does not divide")
    problem = one("parallel.tp=3", "parallel.dp=auto", "model.heads=6", "model.hidden=96",
                  "model.vocab_multiple=96", world_size=8)
    assert "= 6 processes, but the world size is 8" in problem


@pytest.mark.parametrize("world_size, dp", [(16, 4), (4, 1), (None, 1)])
def test_dp_auto(world_size, dp):
    """`auto` that does not use all remaining ranks."""
    config = load(None, ["parallel.tp=2", "parallel.pp=2"], world_size)
    assert config.dp == dp and config.world_size == 4 * dp
    assert load(None, ["parallel.dp=4"]).dp == 4


@pytest.mark.parametrize("tp, overrides, named", [
    (16, (), "model.heads=8"), (2, ("model.heads=4", "model.kv_heads=1"), "model.kv_heads=1"),
    (4, ("model.ffn_hidden=130",), "model.ffn_hidden=130"),
    (2, ("model.vocab=63", "model.vocab_multiple=9"), "the padded vocabulary=63"),
    (4, ("model.vocab=63", "model.vocab_multiple=6"), "parallel.tp=4; set model.vocab_multiple=12"),
    (3, ("model.hidden=128", "model.heads=8"), "model.heads=8")])
def test_tp_divides(tp, overrides, named):
    """A tensor cut into unequal parts."""
    problems = refused(f"parallel.tp={tp}", *overrides)
    assert any(named in problem and f"not divisible by parallel.tp={tp}" in problem for problem in problems)


@pytest.mark.parametrize("overrides, text", [
    (("model.heads=6",), "model.hidden=128 is not divisible by model.heads=6"),
    (("model.kv_heads=3",), "model.heads=8 is not divisible by model.kv_heads=3"),
    (("model.heads=128",), "needs an even head size"),
    (("model.heads=6", "model.head_dim=15"), "needs an even head size; model.head_dim = 15"),
    (("model.rope_scaling=[8,1,4]",), "must be the four numbers of Llama 3's scaling"),
    (("model.rope_scaling=[8,4,4,8192]",), "high_freq_factor above low_freq_factor"),
    (("model.rope_scaling=[8,1,4,8192]", "model.position=learned"), "needs model.position=rotary"),
    (("parallel.sequence_parallel=true",), "needs parallel.tp > 1"),
    (("parallel.sequence_parallel=true", "parallel.tp=2", "model.seq_len=99"),
     "model.seq_len=99 is not divisible"),
    (("train.eval_every=1", "data.validation_fraction=0"), "nothing is held out"),
    (("data.answer_key=a",), "data.answer_key=a needs data.loss_mask=answers, and it is none"),
    (("data.loss_mask=answers", "data.chat_template=a"), "data.chat_template=a needs data.loss_mask=chat"),
    (("data.loss_mask=chat", "data.text_key=a"), "its texts are in data.messages_key; leave it out"),
    (("data.document_mask=true", "run.cuda_graphs=true"), "attention has the shapes of the documents"),
    (("data.mix=['1 a']", "data.source=b"), "one of them names the data"),
    (("optimizer.schedule=wsd", "optimizer.wsd_decay_steps=101"), "longer than optimizer.decay_steps=100"),
])
def test_impossible_combination(overrides, text):
    """Values that are fine alone and not together."""
    assert text in one(*overrides)


def test_stages():
    """A stage without a unit; stage_units that name other units than there are."""
    assert one("parallel.pp=11") == ("parallel.pp=11 makes 11 stages, more than the model's 10 units "
                                     "(embedding, 8 of blocks, head)")
    assert "6 units" in one("parallel.pp=7", "parallel.layers_per_unit=2")
    for units in ("[1,2,7]", "[4,5]", "[10,0]", "[11,-1]"):
        assert "parallel.stage_units" in one("parallel.pp=2", f"parallel.stage_units={units}")
    assert load(None, ["parallel.pp=2", "parallel.stage_units=[1,9]"]).parallel.stage_units == [1, 9]
    assert load(None, ["parallel.pp=10"]).num_stages == 10


UNTIED = "model.tie_embeddings=false"


@pytest.mark.parametrize("overrides, text", [
    (("model.tile_linears=lots",), "model.tile_linears: 'lots' is not an amount of bytes"),
    (("model.tile_linears=-4KiB",), "is not an amount of bytes"),
    (("model.tile_linears=4KiB",), "would cut the word embedding of 512.0 KiB"),
    (("model.tile_linears=1MiB", "parallel.layers_per_unit=2"), "one makes units smaller, the other larger"),
    (("model.tile_linears=64KiB", UNTIED, "parallel.pp=2", "parallel.stage_units=[3,109]"),
     "parts the tiles of a layer, units 0 to 7, which must be on one stage: end a stage after 0 or 8 units, "
     "not after 3"),
    (("model.tile_linears=64KiB", UNTIED, "model.layers=1", "parallel.pp=5"),
     "5 stages, more than the model's 4 layers"),
])
def test_bad_tiles(overrides, text):
    """Values without meaning, tiles of parameters that are shared whole, tiles on two stages."""
    assert text in one(*overrides)


@pytest.mark.parametrize("limit", ["0", "1000", "16KiB", "32767"])
def test_too_small_tiles(limit):
    """The message names the smallest limit that works, and that limit works."""
    problem = one(f"model.tile_linears={limit}", UNTIED)
    assert ("attention has 256.0 KiB a rank, and its smallest tile, one kv head with its queries, has "
            "32768 bytes") in problem
    config = load(None, ["model.tile_linears=32768", UNTIED])
    assert [len(cut) for cut in cut_layers(config)] == [16, *[8 + 16] * 8, 16]
    assert sum(stage_runs(config)) == 8 * (8 + 16) + 2 * 16


def test_idle_tiles():
    """A warning names a limit, or a piece to recompute, that changes nothing."""
    assert any("tile_linears=1GiB does nothing" in line
               for line in warnings(load(None, ["model.tile_linears=1GiB"])))
    tiled = load(None, ["model.tile_linears=64KiB", UNTIED, "activation.policy=selective"])
    assert any("norm does nothing here" in line for line in warnings(tiled))
    assert not any("tile" in line for line in warnings(load(None, ["activation.policy=selective"])))


def test_batch_divides():
    """The message names the three numbers; otherwise samples are dropped in silence."""
    problem = one("train.global_batch_size=10", "train.micro_batch_size=3", "parallel.dp=2")
    assert all(part in problem for part in ("global_batch_size=10", "micro_batch_size=3", "dp=2"))
    config = load(None, ["train.global_batch_size=24", "train.micro_batch_size=2", "parallel.dp=3"])
    assert config.num_microbatches == 4 and config.tokens_per_step == 24 * config.model.seq_len


def test_all_problems_at_once():
    """A user who is told of one problem at a time needs five attempts instead of one."""
    assert len(refused("modle.layers=3", "train.steps=x", "optimizer.lr=-1", "zero.stage=4",
                       "model.norm=none")) == 5
    assert len(refused("model.heads=6", "parallel.pp=12", "train.global_batch_size=7", "parallel.dp=2")) == 3
    mixed = refused("optimizer.lr=-1", "model.heads=6", "train.global_batch_size=7", "parallel.dp=2")
    assert len(mixed) == 3, f"a bad value hides what is wrong elsewhere: {mixed}"


def test_warnings():
    """Settings that can run but are hardly intended give a warning; others give none."""
    assert warnings(load(None)) == []
    lines = warnings(load(None, ["optimizer.warmup_steps=500", "train.steps=10", "parallel.pp=4",
                                 "parallel.dp=8"]))
    assert len(lines) == 2
    assert "warmup_steps=500 is longer than train.steps=10" in lines[0]
    assert "bubble" in lines[1]


def test_registry_name_with_override(tmp_path):
    """A model chosen by name loses a field that is given beside it, in a file or on the command line."""
    path = tmp_path / "c.yaml"
    path.write_text("model: {name: gpt2-small, layers: 3}\n")
    model = load(path, ["model.seq_len=64"]).model
    assert (model.layers, model.seq_len, model.hidden, model.position) == (3, 64, 768, "learned")
    assert load(path, ["model.name=llama3-8b"]).model.layers == 32, "the later word: see test_named"
    problem = one("model.name=gpt2-smal")
    assert "no such size; did you mean gpt2-small?" in problem
    for name in sizes():
        load(None, [f"model.name={name}"])


@pytest.mark.parametrize("text, message", [
    ("model: [1, 2", "cannot be read as YAML"), ("model:\n  layers: 1\n layers: 2", "cannot be read as YAML"),
    ("model: {layers: 1}\nmodel: {layers: 2}", "cannot be read as YAML"),
    ("a: \x00", "cannot be read as YAML"),
    ("model: {layers: '${nothing}'}", "cannot be read as YAML"), ("- 1\n- 2", "must be a mapping"),
    ("just words", None), ("modle:", None)])
def test_bad_yaml(tmp_path, text, message):
    """A file that is not a config ends in a traceback."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(path)
    assert str(path) in str(caught.value) and (message is None or message in str(caught.value))


def test_files(tmp_path):
    """A file that is missing, a folder, not text, or empty (which means: all defaults)."""
    for path, text in ((tmp_path / "no.yaml", "no config file"), (tmp_path, "is not a file")):
        with pytest.raises(InputError, match=text):
            load(path)
    binary, empty = tmp_path / "binary.yaml", tmp_path / "empty.yaml"
    binary.write_bytes(b"model: \xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        load(binary)
    empty.write_text("# nothing\nmodel:\n")
    assert load(empty) == load(None)


@pytest.mark.parametrize("override", ["train.steps", "=3", "", "train.steps=${nothing}", "model.layers=[1"])
def test_bad_override(override):
    """A malformed override is named, not dropped."""
    with pytest.raises(InputError, match="overr"):
        load(None, [override])


def test_overrides_win_and_the_last_wins(tmp_path):
    """The command line has the last word."""
    path = tmp_path / "c.yaml"
    path.write_text("train: {steps: 5, seed: 7}\n")
    config = load(path, ["train.steps=6", "train.steps=7"])
    assert (config.train.steps, config.train.seed) == (7, 7)


def test_a_family_that_gives_a_key_another_default():
    """It keeps what is told of the key; a key of the family's own may tell its values, too."""
    @dataclass
    class Mine(ModelConfig):
        norm: str = "rmsnorm"
        window: int = key(4, "tokens that attention sees", least=1)
        free: int = 3

    told = keys_of(Mine)
    assert told["model.norm"] == keys_of()["model.norm"] and told["model.free"] == KeySpec()
    config = Config(Mine(norm="batchnorm", window=0, free=-1), ParallelConfig(dp=1))
    assert list(map(str, check_values(config))) == [
        "model.norm=batchnorm: must be one of layernorm, rmsnorm", "model.window=0: must be at least 1"]


@pytest.mark.parametrize("value, said", [
    (2, []), (0, ["=0: must be at least 1"]), (8, ["=8: must be less than 8"]), (None, []),
    (math.nan, ["=nan: must be at least 1"]),
    (math.inf, ["=inf: must be finite", "=inf: must be less than 8"])])
def test_bounds(value, said):
    assert list(KeySpec(least=1, below=8).wrong(value)) == said


def test_every_key_is_read():
    """A key that is accepted and never read has no effect: the defect that a config exists to prevent. A key
    with only one possible value so far is honoured by refusing the others; model.name is read where a config
    is built."""
    paths = [*(ROOT / "threed").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    read = {pair for path in paths for pair in _reads(path)}
    exempt = {key for key, spec in keys_of().items() if len(spec.choices) == 1} | {"model.name"}
    unread = [key for key in known_keys() if key not in exempt
              and not any((base, key.split(".")[1]) in read for base in (key.split(".")[0], "config"))]
    assert not unread


def _reads(path: Path) -> set[tuple[str, str]]:
    """(section, key) for each `section.key` that a module reads. In config/ and schema/ only the
    properties of a section count (`self.key`), since checking a value is not using it."""
    tree = ast.parse(path.read_text())
    keys = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if path.parent.name not in ("config", "schema"):
                keys.add((base, node.attr))
            elif base == "self":
                keys.add(("config", node.attr))
    return keys


def test_defaults_are_a_config():
    """The defaults themselves must run."""
    assert load(None) == load(None, [], 1) and subject.validate(Config(parallel=ParallelConfig(dp=1))) == []


def test_configs_share_nothing():
    """What a script does to one config must not appear in the next, though both are copies of one schema."""
    text = "activation.pieces=[attention,norm]"
    first = load(None, [text, "activation.policy=selective"])
    assert first.activation.pieces is not None
    first.activation.pieces.append("mlp_act")
    first.model.layers += 1
    second = load(None, [text, "activation.policy=selective"])
    assert second.activation.pieces == ["attention", "norm"]
    assert second.model.layers == load(None).model.layers == first.model.layers - 1


@pytest.mark.parametrize(("text", "overrides", "says"), [
    ("", [], "is empty: threed init writes a first config"),
    ("optimizer: {lr: abc}", [], "optimizer.lr=abc: must be a number"),
    ("train: {steps: many}", [], "train.steps=many: must be a whole number"),
    ("model: {name: google/gemma-7b}", [], "or take threed import for a model of Hugging Face")])
def test_first_mistakes(text, overrides, says, tmp_path):
    """What a new user writes first."""
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(says)):
        load(tmp_path / "my.yaml", overrides)


def test_an_empty_file_with_overrides_is_a_config(tmp_path):
    (tmp_path / "my.yaml").write_text("# mine")
    assert load(tmp_path / "my.yaml", ["train.steps=3"]).train.steps == 3


def test_options_of_megatron_are_led_to_convert(tmp_path):
    """Where the file is Megatron-LM's: not for an override, a file of ours, or our keys without sections."""
    path = tmp_path / "my.yaml"
    hint = f"\nthreed convert --megatron {path} makes a config of it"
    for text in ("num_layers: 4\nlr: 1e-4", "micro-batch-size: 4"):
        path.write_text(text)
        for refuse in (load, lambda path: for_devices(path, [], None, "check")):
            with pytest.raises(ConfigError) as caught:
                refuse(path)
            assert str(caught.value).endswith(hint)
            assert not any(hint in problem.text for problem in caught.value.problems)
    for text in ("train: {steps: 3}", "train: {steps: 3}\nnum_layers: 4", "layers: 4\nhidden: 8"):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(path, ["betas=0.9,0.95", "num_layers=3"])
        assert "convert" not in str(caught.value)


def test_a_deepspeed_config_is_led_to_convert(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    with pytest.raises(ConfigError, match=r"threed convert .*ds.json makes a config of it"):
        load(tmp_path / "ds.json")
    (tmp_path / "ours.json").write_text('{"train": {"steps": 8, "stps": 2}}')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "ours.json")
    assert "convert" not in str(caught.value)

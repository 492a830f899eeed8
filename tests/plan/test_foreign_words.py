"""Words of other frameworks, typed as keys or options of threed: what to write in their place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from threed.base.words import _WORDS
from threed.cli.options import instead
from threed.config.keys.transformers import TRANSFORMERS
from threed.config.load import known_keys
from threed.config.synonyms import _EVERYONES, FRAMEWORKS
from threed.config.unknown import unknown
from threed.interop.hf.names import FAMILIES as OF_TRANSFORMERS
from threed.models.families.registry import FAMILIES
from threed.schema import keys_of

EVERY = {key for family in FAMILIES.values() for key in keys_of(family.config)}


def said(key: str) -> str:
    return unknown(key, known_keys()).text


@pytest.mark.parametrize("key, ours", [
    ("model.top_k", "model.experts_per_token"), ("model.num_experts_per_tok", "model.experts_per_token"),
    ("model.num_experts_per_token", "model.experts_per_token"),
    ("model.moe_router_topk", "model.experts_per_token"), ("moe.top_k", "model.experts_per_token"),
    ("model.num_local_experts", "model.experts"), ("model.n_routed_experts", "model.experts"),
    ("model.capacity_factor", "model.moe_capacity"), ("model.eval_capacity_factor", "model.moe_capacity"),
    ("model.aux_loss", "model.balance=sequence"), ("model.router_aux_loss_coef", "model.balance_weight"),
    ("model.aux_loss_alpha", "model.balance_weight"), ("model.router_z_loss", "model.z_loss"),
    ("model.bias_update_speed", "model.balance=bias"), ("model.load_balance_coeff", "model.balance=bias"),
    ("model.moe_intermediate_size", "model.expert_ffn_hidden"),
    ("model.n_shared_experts", "model.shared_expert_ffn"), ("model.norm_topk_prob", "model.normalize_top_k"),
    ("model.score_func", "model.router_score"), ("model.first_k_dense_replace", "model.first_dense"),
    ("parallel.expert_parallel_degree", "parallel.ep"), ("parallel.ep_size", "parallel.ep"),
    ("parallel.expert_model_parallel_size", "parallel.ep"), ("parallel.etp", "parallel.ep"),
    ("optimizer.muon", "use optimizer.name=muon"), ("optimizer.adafactor", "adamw, lion, muon"),
    ("optimizer.adam_epsilon", "optimizer.eps"), ("parallel.context_parallel", "use parallel.cp"),
    ("parallel.data_parallel_shard_degree", "zero.shard_size"),
    ("parallel.tensor_parallel_degree", "parallel.tp"),
    ("parallel.hsdp", "zero.shard_size"), ("precision.fp8", "no fp8"), ("model.mla", "no latent attention"),
    ("model.sliding_window", "attention sees the whole sequence"), ("model.rms_norm_eps", "model.norm_eps"),
    ("model.hidden_act", "model.activation"), ("model.kv_lora_rank", "no latent attention")])
def test_a_foreign_word_has_its_hint(key: str, ours: str):
    assert ours in said(key), said(key)


@pytest.mark.parametrize("key", ["model.banana", "optimizer.zebra", "parallel.qqq", "train.colour"])
def test_a_word_of_nobody_has_none(key: str):
    assert said(key).endswith("the keys are listed in configs/reference.yaml")


def test_the_table_of_transformers_says_what_the_import_reads():
    """Each key that `threed import` reads leads to the key of ours that it fills."""
    for family in OF_TRANSFORMERS.values():
        for key in family.keys:
            for theirs in filter(None, (key.theirs, key.also)):
                if theirs == key.ours:
                    continue
                row = TRANSFORMERS.row(theirs)
                hint = row.ours if row else said(f"model.{theirs}")
                wrong = f"{theirs} is model.{key.ours}: {hint}"
                assert f"model.{key.ours}" in hint.split() or f"model.{key.ours}" in hint, wrong


def test_a_word_is_known_in_one_place():
    """What a table of a framework has by its name is none of the words of many."""
    twice = [word for word in _WORDS if word not in _EVERYONES for framework in FRAMEWORKS
             if (row := framework.row(word)) is not None and "*" not in row.theirs]
    assert not twice


def test_a_hint_names_keys_that_there_are():
    for framework in FRAMEWORKS:
        for row in framework.rows:
            assert row.key is None or row.key in EVERY, row


@pytest.mark.parametrize("words, ours", [
    (["--num-experts=8"], "model.family=moe"), (["--top-k", "2"], "model.experts_per_token"),
    (["--optimizer", "muon"], "optimizer.name=muon"),
    (["--router-aux-loss-coef", "1"], "model.balance_weight"),
    (["--context-parallel-size", "2"], "use parallel.cp"),
    (["--memory", "80GB"], "threed init, check and search take --memory")])
def test_a_foreign_option_has_its_hint(words: list[str], ours: str):
    command = ["train", "configs/toy.yaml", *words]
    option = words[0].partition("=")[0]
    hints = instead(SimpleNamespace(option_name=option), command)  # pyright: ignore[reportArgumentType]
    assert len(hints) == 1 and ours in hints[0]

"""PEFT's keys, those of its LoraConfig, and what each is here."""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import NO_KEY, NOTHING, Framework, Given, Row

ROWS = (
    Row("r", "model.lora_rank"),
    Row("lora_alpha", "model.lora_alpha (null here is r: what adapters add is multiplied by 1)"),
    Row("target_modules", "model.lora_targets (of GPT-2, c_attn is qkv_proj, c_fc is up_proj, and the two "
                          "c_proj are o_proj and down_proj)"),
    Row("lora_dropout", NOTHING + "adapters have no dropout of their own"),
    Row("use_rslora", NOTHING + "set model.lora_alpha to alpha x sqrt(r)"),
    Row("use_dora", NOTHING + "threed has plain LoRA"),
    Row("modules_to_save", NOTHING + "all weights but adapters are frozen"),
    Row("layers_to_transform", NOTHING + "all blocks have the same adapters"),
    Row("rank_pattern", NOTHING + "all adapters have one rank"),
    Row("alpha_pattern", NOTHING + "all adapters have one alpha"),
    Row("fan_in_fan_out", NO_KEY + "threed export --adapters writes what the model needs"),
    Row("init_lora_weights", NO_KEY + "A is uniform and B zero, as by default there"),
)


def _nothing(_: Given) -> dict[str, Any]:
    return {}


PEFT = Framework("PEFT", ROWS, _nothing)

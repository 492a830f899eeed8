"""PEFT's keys, those of its LoraConfig, and what each is here."""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import NO_KEY, NOTHING, Framework, Given, Key

ROWS = (
    Key("r", "model.lora_rank"),
    Key("lora_alpha", "model.lora_alpha (null here is r: what adapters add is multiplied by 1)"),
    Key("target_modules", "model.lora_targets (of GPT-2, c_attn is qkv_proj, c_fc is up_proj, and the two "
                          "c_proj are o_proj and down_proj)"),
    Key("lora_dropout", NOTHING + "adapters have no dropout of their own"),
    Key("use_rslora", NOTHING + "set model.lora_alpha to alpha x sqrt(r)"),
    Key("use_dora", NOTHING + "threed has plain LoRA"),
    Key("modules_to_save", NOTHING + "all weights but adapters are frozen"),
    Key("layers_to_transform", NOTHING + "all blocks have the same adapters"),
    Key("rank_pattern", NOTHING + "all adapters have one rank"),
    Key("alpha_pattern", NOTHING + "all adapters have one alpha"),
    Key("fan_in_fan_out", NO_KEY + "threed export --adapters writes what the model needs"),
    Key("init_lora_weights", NO_KEY + "A is uniform and B zero, as by default there"),
)


def _nothing(_: Given) -> dict[str, Any]:
    return {}


PEFT = Framework("PEFT", ROWS, _nothing)

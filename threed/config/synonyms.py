"""What a key of DeepSpeed, Megatron-LM or torchtitan is here: for the error about an unknown key."""

from __future__ import annotations

from threed.config.keys.deepspeed import DEEPSPEED
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_values import RANKS
from threed.config.keys.peft import PEFT
from threed.config.keys.table import NO_KEY, NOTHING, Framework, Key
from threed.config.keys.torchtitan import TORCHTITAN

# Words that are everyone's and not Megatron-LM's, though its scripts are read with them: options of
# launchers, an older name with two meanings here, names that its `log_*` covers. `words` knows them.
_EVERYONES = {name for names in RANKS for name in names} | {"batch_size", "log_every", "log_freq", "log_dir"}
FRAMEWORKS = (DEEPSPEED, MEGATRON, TORCHTITAN, PEFT)


def ours(key: str) -> str | None:
    """What to use in place of a key of another framework; None where it is none of theirs."""
    found = whose(key)
    return found and found[1]


def whose(key: str) -> tuple[str, str] | None:
    """The framework whose key it is, and what to use in its place; None where it is none's. A key that threed
    calls the same, in another section, is left to a search for names alike."""
    titan = next((row for row in TORCHTITAN.rows if row.theirs == key), None)
    if titan is not None:
        return _instead(TORCHTITAN, key, titan)
    last = key.lstrip("-").rpartition(".")[2].replace("-", "_")
    tuned = next((row for row in PEFT.rows if row.theirs == last), None)
    if tuned is not None and (tuned.key or "").rpartition(".")[2] != last:
        return _instead(PEFT, key, tuned)
    first, dot, _ = key.partition(".")
    section = dot and first in DEEPSPEED.sections
    for framework, name in ((DEEPSPEED, key), (MEGATRON, last)):
        row = None if last in _EVERYONES and not section else framework.row(name)
        if row is not None and (section or (row.key or "").rpartition(".")[2] != last):
            return _instead(framework, key, row)
    if section:
        return DEEPSPEED.name, f"for DeepSpeed's {key} use the section {DEEPSPEED.sections[first]}"
    return None


def _instead(framework: Framework, key: str, row: Key) -> tuple[str, str]:
    there_is = row.ours.startswith((NO_KEY, NOTHING))
    return framework.name, f"for {framework.name}'s {key} {'there is' if there_is else 'use'} {row.ours}"

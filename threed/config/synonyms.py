"""What a key of another framework is here: for the error about an unknown key. Its tables are in
`config.keys`; `base.words` has what belongs to no framework."""

from __future__ import annotations

from threed.base.words import meant
from threed.config.keys.deepspeed import DEEPSPEED
from threed.config.keys.megatron import MEGATRON
from threed.config.keys.megatron_values import RANKS
from threed.config.keys.peft import PEFT
from threed.config.keys.table import NO_KEY, NOTHING, Framework, Key
from threed.config.keys.torchtitan import TORCHTITAN
from threed.config.keys.transformers import TRANSFORMERS

# Words that are everyone's and not Megatron-LM's, though its scripts are read with them: options of
# launchers, an older name with two meanings here, names that its `log_*` covers. `words` knows them.
_EVERYONES = {name for names in RANKS for name in names} | {"batch_size", "log_every", "log_freq", "log_dir"}
FRAMEWORKS = (DEEPSPEED, MEGATRON, TORCHTITAN, TRANSFORMERS, PEFT)


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
    many = meant(key) is not None  # it is a word of many; then a row for many keys says less
    found = [(framework, framework.row(name)) for framework, name in (
        (DEEPSPEED, key), (MEGATRON, last), (TRANSFORMERS, last))]
    for framework, row in sorted(found, key=lambda each: each[1] is not None and "*" in each[1].theirs):
        if row is None or (not section and (last in _EVERYONES or (many and "*" in row.theirs))):
            continue
        if section or (row.key or "").rpartition(".")[2] != last:
            return _instead(framework, key, row)
    if section:
        return DEEPSPEED.name, f"for DeepSpeed's {key} use the section {DEEPSPEED.sections[first]}"
    return None if many else _by_end(last)


def _by_end(last: str) -> tuple[str, str] | None:
    """Of a key that ends as one of a framework alone, which has it in a section that is not written."""
    for framework in (TORCHTITAN, DEEPSPEED) if "_" in last and last not in _EVERYONES else ():
        rows = [row for row in framework.rows if row.theirs.rpartition(".")[2] == last]
        if len({row.ours for row in rows}) == 1 and (rows[0].key or "").rpartition(".")[2] != last:
            return _instead(framework, rows[0].theirs, rows[0])
    return None


def _instead(framework: Framework, key: str, row: Key) -> tuple[str, str]:
    there_is = row.ours.startswith((NO_KEY, NOTHING))
    whose = f"{framework.name}'" + "s" * (not framework.name.endswith("s"))
    return framework.name, f"for {whose} {key} {'there is' if there_is else 'use'} {row.ours}"

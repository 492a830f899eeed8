"""Bytes, seconds and counts: parse and print. Plain values, no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction

from threed.base.errors import InputError

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of an element, by precision.dtype and its like
ALIGNMENT = 4096  # bytes: of memory, lengths and offsets, for reads and writes of a disk past the page cache
_BINARY = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_COUNTS = {"": 1.0, **dict.fromkeys(("k", "thousand"), 1e3), **dict.fromkeys(("m", "mn", "million"), 1e6),
           **dict.fromkeys(("b", "bn", "billion"), 1e9), **dict.fromkeys(("t", "tn", "trillion"), 1e12)}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str | int) -> int:
    """'1.5GiB' or '200MB' or 4096 -> bytes. Binary units are powers of 1024, decimal ones of 1000."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    scale = {**_BINARY, **_DECIMAL}.get(unit) if unit is not None else None
    if match is None or scale is None:
        raise InputError(f"'{text}' is not an amount of bytes; write for example 512MiB, 1.5GiB or 2GB")
    return int(float(match.group(1)) * scale)


def parse_limit(text: str) -> tuple[float | None, int | None]:
    """A limit of activations. '2x' -> (2.0, None): times 1F1B's peak. '30GiB' -> (None, bytes)."""
    if text.endswith("x"):
        try:
            times = float(text[:-1])
        except ValueError:
            times = -1.0
        if not 0 < times < math.inf:
            raise InputError(f"'{text}' is not a multiple of 1F1B's peak; write for example 1x or 1.5x")
        return times, None
    return None, parse_bytes(text)


def parse_memory(text: str) -> int:
    """Bytes of a device's memory; InputError for so few that a unit was forgotten: 80 instead of 80GiB."""
    size = parse_bytes(text)
    if size < 2**20:
        raise InputError(f"{text} are {size} bytes: write a unit, such as {text.strip()}GiB")
    return size


def parse_count(text: str) -> float:
    """'7.5e9' or '7.5B' or '7,500,000,000' -> 7.5e9."""
    match = re.fullmatch(r"([0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*([a-z]*)", text.strip().lower())
    scale = _COUNTS.get(match[3]) if match else None
    count = float(re.sub("[_,]", "", match[1]) + (match[2] or "")) * scale if match and scale else 0.0
    if not 0 < count < 1e18:
        raise InputError(f"'{text}' is not a count; give a number above 0, such as 7.5e9 or 7.5B")
    return count


def whole_number(value: object) -> int | None:
    """1000.0, 1e3, '1e3' or '8' -> a whole number; None where the value is none."""
    if isinstance(value, str):
        if not re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE]\+?\d{1,2})?\s*", value):
            return None
        value = int(value) if value.strip().lstrip("+-").isdigit() else float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if float(value).is_integer() else None
def parse_parameters(text: str) -> float:
    """The parameters of a model; InputError for so few that a unit was forgotten: 8 instead of 8B."""
    count = parse_count(text)
    if count < 1e4:
        number = f"{count:g}"
        raise InputError(f"--parameters {text}: a model of {number} parameters? Did you mean {number}B "
                         f"(billions) or {number}M (millions)?")
    return count


def show_bytes(amount: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError


def show_seconds(amount_s: float) -> str:
    """0.0123 -> '12.3 ms'."""
    if amount_s < 1e-3:
        return f"{amount_s * 1e6:.0f} us"
    if amount_s < 1:
        return f"{amount_s * 1e3:.1f} ms"
    if amount_s < 120:
        return f"{amount_s:.1f} s"
    return f"{amount_s / 60:.1f} min"


def show_left_s(amount_s: float) -> str:
    """7500 -> '2h05m', for people who wait."""
    minutes = round(amount_s / 60)
    if amount_s < 120:
        return f"{amount_s:.0f}s"
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 48 * 60:
        return f"{minutes // 60}h{minutes % 60:02}m"
    return f"{minutes // 1440}d{minutes % 1440 // 60:02}h"


def parse_seconds(text: str) -> float:
    """'3h50m', '90m', '2d', '1d12h' or '13800' -> seconds; InputError where it is none of them."""
    if re.fullmatch(r"[0-9]*\.?[0-9]+", text.strip()):
        return float(text)
    parts = re.findall(r"([0-9]*\.?[0-9]+)\s*([dhms])", text.lower())
    if not parts or re.sub(r"([0-9]*\.?[0-9]+)\s*([dhms])\s*", "", text.lower()).strip():
        raise InputError(f"'{text}' is not a duration; write for example 90m, 3h50m, 2d, or seconds: 13800")
    return sum(float(number) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def many(count: int, what: str) -> str:
    """1, 'rank' -> '1 rank'; 2, 'rank' -> '2 ranks'."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def show_many(count: int, what: str) -> str:
    """1, 'document' -> '1 document'; 12_400, 'document' -> '12.4K documents'."""
    return f"{show_count(count)} {what}{'' if count == 1 else 's'}"


def show_left(done: float, total: float, elapsed_s: float) -> str:
    """', 25% done, at most 3.0 s left', at the pace so far; '' where nothing is done or `total` is passed.
    `total`: at least as much as there is to do."""
    if not 0 < done < total:
        return ""
    return f", {done / total:.0%} done, at most {show_seconds(elapsed_s * (total / done - 1))} left"


def show_count(amount: float) -> str:
    """124_439_808 -> '124.4M'."""
    for unit in ("", "K", "M", "B", "T"):
        if abs(amount) < 1000 or unit == "T":
            return f"{amount:.0f}" if unit == "" else f"{amount:.1f}{unit}"
        amount /= 1000
    raise AssertionError


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple


def prime_factors(number: int) -> tuple[int, ...]:
    """Ascending, each as often as it divides the number."""
    least = next((each for each in range(2, number + 1) if number % each == 0), None)
    return () if least is None else (least, *prime_factors(number // least))


def divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the counts of each name."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def ring(size: int, ranks: int) -> int:
    """Bytes a rank sends in a ring all-gather or reduce-scatter of a buffer of `size` bytes."""
    return size * (ranks - 1) // ranks


def parse_weighted(entry: str) -> tuple[Fraction, str]:
    """'0.7 /data/web' -> (7/10, '/data/web')."""
    text, _, source = entry.strip().partition(" ")
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if weight <= 0 or not source.strip():
        raise InputError(f"'{entry}' is not a weight above 0 and a source; write for example '0.7 /data/web'")
    return weight, source.strip()

"""Files that are damaged while nothing runs: cut, as after a crash of a host; a bit or a digit other than it
was; gone."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from tests.chaos import tensors
from tests.chaos.faults import kind
from tests.chaos.sister import ANY_MESH, PACE_S, STEPS, Sister
from tests.chaos.trial import Fault, Skip, Trial, send

DAMAGED = r"damaged|checksum|cannot be read|incomplete|not there whole|unusable"


def after_a_crash(trial: Trial, text: str, damage: Callable[[Path], str], says: str = DAMAGED) -> Fault:
    """The power fails once there are two checkpoints; then `damage` is done to the newest. It returns what it
    damaged."""
    after = trial.rng.uniform(0.0, 3 * PACE_S)

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_saved(run, 2) and trial.sleep(run, after):
            trial.kill_node(run)

    def between(trial: Trial) -> None:
        newest = tensors.newest(trial.run_dir)
        if newest is not None and not trial.done():
            fault.text = f"{text}: {damage(newest)}"
        else:
            trial.marker.unlink(missing_ok=True)

    fault = Fault(text, says, act=act, between=between)  # (its text is completed by what was drawn)
    return fault


def _pick(trial: Trial, folder: Path, glob: str) -> Path:
    files = sorted(folder.glob(glob))
    if not files:
        raise Skip(f"a checkpoint has no file {glob}")
    return trial.rng.choice(files)


def flip(trial: Trial, file: Path) -> str:
    content = bytearray(file.read_bytes())
    at, bit = trial.rng.randrange(len(content)), trial.rng.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {file.name}"


def cut(trial: Trial, file: Path) -> str:
    size = file.stat().st_size
    keep = trial.rng.randrange(size)
    with file.open("rb+") as opened:
        opened.truncate(keep)
    return f"{file.name} cut to {keep} of {size} bytes"


def _flips(name: str, weight: int, glob: str) -> None:
    @kind(f"damage: a bit of {name}", weight)
    def flips(trial: Trial) -> Fault:
        return after_a_crash(trial, "a flipped bit", lambda folder: flip(trial, _pick(trial, folder, glob)))


_flips("a shard", 3, "*.safetensors")
_flips("the manifest", 2, "manifest.json")
_flips("another file", 1, "[!mr]*")


@kind("damage: a file is cut", 3)
def cut_file(trial: Trial) -> Fault:
    return after_a_crash(trial, "a torn write", lambda folder: cut(trial, _pick(trial, folder, "*")))


@kind("damage: a file is gone", 1)
def gone(trial: Trial) -> Fault:
    def damage(folder: Path) -> str:
        file = _pick(trial, folder, "*")
        file.unlink()
        if file.name == "manifest.json":
            fault.says = ""
        return file.name

    fault = after_a_crash(trial, "a file is gone", damage)
    return fault


@kind("damage: a digit of the manifest", 3)
def digit(trial: Trial) -> Fault:
    def damage(folder: Path) -> str:
        file = folder / "manifest.json"
        text = file.read_text()
        at = trial.rng.choice([i for i, letter in enumerate(text) if letter.isdigit()])
        other = trial.rng.choice([d for d in "0123456789" if d != text[at]])
        file.write_text(text[:at] + other + text[at + 1:])
        line = text.count("\n", 0, at)
        before, after = (whole.splitlines()[line].strip()[:80] for whole in (text, file.read_text()))
        return f"{before} became {after}"

    return after_a_crash(trial, "an edited digit", damage)


@kind("damage: latest", 2)
def latest(trial: Trial) -> Fault:
    def damage(folder: Path) -> str:
        file = folder.parent / "latest"
        if not file.exists():
            raise Skip("there is no file `latest`")
        return trial.rng.choice([flip, cut])(trial, file)

    return after_a_crash(trial, "`latest` is damaged", damage, says="")


@kind("damage: the tail of metrics.jsonl", 2)
def tail(trial: Trial) -> Fault:
    """What a host that crashes has not written yet: rows after the newest checkpoint's."""
    def damage(folder: Path) -> str:
        file = trial.run_dir / "metrics.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        kept = sum(map(len, lines[:tensors.step_of(folder)]))
        size = kept + trial.rng.randrange(max(1, sum(map(len, lines)) - kept))
        with file.open("rb+") as opened:
            opened.truncate(size)
        return f"metrics.jsonl cut to {size} bytes"

    return after_a_crash(trial, "a torn write", damage, says="")


@kind("another mesh", 4, sisters=ANY_MESH)
def other_mesh(trial: Trial) -> Fault:
    trial.planned = trial.rng.choice([name for name in ANY_MESH if name != trial.reference.name])
    step = trial.rng.randrange(4, STEPS)

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_step(run, step):
            trial.kill_node(run)

    def between(trial: Trial) -> None:
        if tensors.newest(trial.run_dir) is None:
            fault.says = ""  # there is nothing to go on from

    fault = Fault(f"SIGKILL of all after step {step}; goes on as '{trial.planned}'", "resumed from", act=act,
                  between=between)
    return fault


# ---------------------------------------------------------------- prepared data, and other runs


def own_cache(trial: Trial, copied: bool) -> Path:
    """A cache of prepared data for this trial."""
    cache = trial.folder / "cache"
    (shared,) = (Path(word.partition("=")[2]) for word in trial.data if word.startswith("data.cache="))
    if copied:
        shutil.copytree(shared, cache)
    trial.data = [word for word in trial.data if not word.startswith("data.cache=")] + [f"data.cache={cache}"]
    trial.caches.append(cache)
    return cache


@kind("damage: prepared data", 3)
def data(trial: Trial) -> Fault:
    """The user does what the message says: delete the folder that it names."""
    cache = own_cache(trial, copied=True)
    file = trial.rng.choice(sorted(path for path in cache.rglob("*") if path.is_file()))
    how = trial.rng.choice([flip, cut])
    what = how(trial, file)

    def act(trial: Trial, run: Sister) -> None:
        trial.strike()

    def between(trial: Trial) -> None:
        if "delete the folder" in trial.output:
            for folder in cache.iterdir():
                shutil.rmtree(folder)

    return Fault(f"prepared data: {what}", r"damaged|checksum", act=act, between=between)


@kind("preparation is killed", 3)
def preparation(trial: Trial) -> Fault:
    own_cache(trial, copied=False)
    after = trial.rng.uniform(0.05, 0.6)
    number = trial.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    whom = trial.rng.choice(["launcher", "child"])

    def act(trial: Trial, run: Sister) -> None:
        if not trial.sleep(run, after):
            return
        victims = [run.pid] if whom == "launcher" else [child.pid for child in trial.family(run)]
        if victims:
            trial.strike()
            send(victims[0], number)

    return Fault(f"{signal.Signals(number).name} of the {whom} while data are prepared, after {after:.2f} s",
                 act=act)


@kind("two runs in one folder", 1)
def two_runs(trial: Trial) -> Fault:
    step = trial.rng.randrange(1, STEPS - 4)

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_step(run, step):
            trial.strike()
            second = Sister(trial.folder, trial.argv, [])
            status = second.join(30)
            second.kill()
            if run.alive() and (status != 2 or "is in use by another run" not in second.output):
                trial.verdicts["wrong"] = f"a second run in the same folder ended with {status}"

    return Fault(f"another run is started in the folder after step {step}", act=act)

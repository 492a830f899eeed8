"""Report: what `threed predict CONFIG` prints of a prediction."""

from __future__ import annotations

from collections.abc import Iterator

from threed.base.quantity import many, show_bytes, show_count, show_seconds
from threed.base.texttable import render, wrapped
from threed.prediction.peak import show as show_peak
from threed.prediction.predict import MachinePrediction
from threed.program.summary import sent_over


def _peaks(predicted: MachinePrediction, columns: int | None) -> Iterator[str]:
    """What the highest peak is made of, and a warning where a device has not that much."""
    yield wrapped(show_peak(predicted.step.peaks), columns)
    if predicted.too_much:
        room = show_bytes(predicted.memory_bytes).replace(" ", "")
        yield (f"warning: {predicted.too_much}; threed check --memory {room} looks for settings that fit, "
               "threed search for another mesh")
    if predicted.host_too_much:
        yield wrapped(f"warning: {predicted.host_too_much}", columns)


def show_costs(costs: str, is_usual: bool, columns: int | None = None) -> list[str]:
    """Whose prices times are. `is_usual`: of the machine that nobody has asked for."""
    usual = "(by default; for another machine --hardware NAME|FILE, for this one's processors run.device=cpu)"
    return [f"costs: {costs}", *([wrapped(usual, columns)] if is_usual else [])]


def show(predicted: MachinePrediction, columns: int | None = None) -> str:
    """The report as a table. `columns`: of a terminal, if it is to fit."""
    step, machine, stages = predicted.step, predicted.machine, predicted.step.stages
    held = [row.summary for row in stages]
    axes = sent_over(held)
    rows = [(f"pp{position}", show_seconds(row.busy_s), f"{row.bubble:.1%}", show_bytes(row.peak.total),
             show_bytes(row.peak.fixed_bytes), show_bytes(row.summary.activation_peak_bytes),
             *(show_bytes(row.summary.sent_bytes.get(axis, 0)) for axis in axes))
            for position, row in enumerate(stages)]
    # What makes a device wait: without a pipeline, traffic that no computation hides.
    idle = "bubble" if len(stages) > 1 else "exposed traffic"
    lines = [*show_costs(step.costs, predicted.is_usual and not machine.waits, columns),
             f"step {show_seconds(step.step_s)}, {idle} {step.bubble:.1%}, {show_count(predicted.rate)} "
             f"{predicted.counted}/s" + (f", MFU {predicted.mfu:.1%}" if predicted.mfu is not None else ""),
             render(("a rank of", "busy", "bubble", "peak", "fixed", "activations",
                     *(f"sends {axis}" for axis in axes)), rows, columns)]
    lines += _peaks(predicted, columns)
    if step.slower > 1:
        lines.append(wrapped(f"{predicted.devices} ranks share {many(machine.devices, 'processor')}: what "
                             f"one computes takes {step.slower:.1f} times as long, which is no bubble",
                             columns))
    for position, row in enumerate(stages):
        if moved := row.summary.moved_bytes:
            links = ", ".join(f"{lane} {show_bytes(size)} in {show_seconds(row.transfer_s.get(lane, 0.0))}"
                              for lane, size in sorted(moved.items()))
            links += f"; the host steps in {show_seconds(row.host_s)}" if row.host_s else ""
            lines.append(wrapped(f"pp{position} {row.summary.away()}; moves a step: {links}", columns))
    if saved := step.checkpoint:
        lines.append(wrapped(f"a checkpoint copies {show_bytes(saved.bytes)} a rank to the host in "
                             f"{show_seconds(saved.copy_s)}, beside the next step, which takes "
                             f"{show_seconds(saved.blocked_s)} longer", columns))
    if any(row.moved_bytes for row in held):
        moves, both = (show_seconds(max(0.0, longer))
                       for longer in (step.exposed_transfer_s, step.exposed_host_s))
        steps = f", and with the host's steps {both}" if any(row.host_s for row in stages) else ""
        lines.append(f"moving between tiers makes the step {moves} longer than if it were free{steps}")
    if (verify := step.verify) is not None:
        lines.append(wrapped(f"every {verify.every} steps one is computed twice: "
                             f"{show_seconds(verify.rehearsal_s)} longer, "
                             f"{show_seconds(verify.step_s)} a step on average, without checksums", columns))
    if (whole := predicted.training) is not None:
        money = f", {whole.dollars:,.0f} dollars" if whole.dollars else ""
        lines.append(f"{show_count(whole.tokens)} tokens take {whole.days:,.1f} days, "
                     f"{whole.device_hours:,.0f} device-hours{money}")
    return "\n".join(lines)

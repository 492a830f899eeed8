"""Figures: mesh and units, memory, where the time goes, bytes, and the course of a run."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from threed.base.axes import AXES, shown
from threed.base.quantity import show_bytes, show_count, show_seconds
from threed.html_report import colors
from threed.html_report.content import Content, thin
from threed.html_report.drawing import FAINT, INK, MEASURED, PREDICTED, byte_unit, finish, plotly, time_unit
from threed.monitor.attribute import CAUSES
from threed.monitor.compare import HEADS
from threed.prediction.peak import fullest
from threed.prediction.step import highest
from threed.program.summary import sent_over

CELLS = 200_000  # ranks of which a mesh is drawn
WRITTEN = 32  # columns of a mesh up to which ranks have their numbers written into them
CURVES = 8  # positions of which memory over time is drawn
POINTS = 400  # of a curve of memory
STEPS = 2_000  # points of a run's curves
_UNITS_WIDTH, _LETTER = 490, 6.6  # pixels of the column of units, and of a letter in it
LAYER_COLORS = ("#d8e5f3", "#c6d9ee")  # of units, by stage: even, odd
END_COLOR = "#fbe3c8"  # of the first and the last unit


def units(content: Content) -> Any:
    """The ranks of each position, its units, and its parameters."""
    go, make_subplots = plotly()
    mesh, rows = content.mesh, [row.summary for row in content.stages]
    shown = mesh.size <= CELLS
    figure = make_subplots(cols=3 if shown else 2, rows=1, shared_yaxes=True, horizontal_spacing=0.03,
                           column_widths=[0.3, 0.5, 0.2] if shown else [0.7, 0.3],
                           subplot_titles=[*([f"ranks: {mesh.text()}"] if shown else []),
                                           "compute units", "parameters of a rank"])
    if shown:
        figure.add_trace(_ranks(content), row=1, col=1)
    for trace in _unit_bars(content):
        figure.add_trace(trace, row=1, col=2 if shown else 1)
    figure.add_trace(go.Bar(
        orientation="h", y=list(range(len(rows))), x=[row.parameters for row in rows],
        text=[show_count(row.parameters) for row in rows], textposition="auto", showlegend=False,
        marker_color="#a3bfdc", hovertemplate="pp%{y}: %{x:,} parameters of a rank<extra></extra>"),
        row=1, col=3 if shown else 2)
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=[f"pp{p}" for p in range(len(rows))],
                        range=[len(rows) - 0.5, -0.5], showgrid=False)
    figure.update_xaxes(showgrid=False, showticklabels=False)
    return finish(figure, 90 + max(3, len(rows)) * (30 if len(rows) <= 16 else 16), barmode="stack",
                  bargap=0.18, uniformtext={"mode": "hide", "minsize": 8}, showlegend=False)


def _ranks(content: Content) -> Any:
    """A cell a rank: rows are positions, the shade is the replica."""
    import numpy

    go, _ = plotly()
    mesh = content.mesh
    others = [axis for axis in shown(mesh.sizes) if axis != "pp"]
    columns = mesh.size // mesh.positions
    numbers = numpy.zeros((mesh.positions, columns), dtype=numpy.int32)
    shades, names = numpy.zeros_like(numbers), [""] * columns
    filled = [0] * mesh.positions
    for rank in sorted(range(mesh.size), key=lambda rank: [mesh.coordinate(rank).on[axis] for axis in AXES]):
        here = mesh.coordinate(rank)
        column, filled[here.position] = filled[here.position], filled[here.position] + 1
        numbers[here.position, column], shades[here.position, column] = rank, here.replica % 2
        names[column] = " ".join(f"{axis}{here.on[axis]}" for axis in others)
    written = columns <= WRITTEN
    return go.Heatmap(
        z=shades, zmin=0, zmax=1, colorscale=[[0, "#d9ecea"], [1, "#b5d9d5"]], showscale=False,
        xgap=1 if columns <= 256 else 0, ygap=2, customdata=numbers, x=names,
        text=[[str(rank) for rank in row] for row in numbers] if written else None,
        texttemplate="%{text}" if written else None,
        hovertemplate="rank %{customdata}<br>pp%{y} %{x}<extra></extra>")


def _unit_bars(content: Content) -> list[Any]:
    """The units of each position in order, a trace for the n-th of each; stages alternate in shade."""
    go, _ = plotly()
    table = content.plan.table
    positions = dict.fromkeys(table.position(index) for index in range(len(table.units)))
    places = [table.units_of(position) for position in positions]
    traces, most = [], max(map(len, places))
    for nth in range(most):
        here = [(row[nth], table.units[row[nth]]) for row in places if nth < len(row)]
        traces.append(go.Bar(
            orientation="h", x=[1.0] * len(here), y=[table.position(index) for index, _ in here],
            text=[_short(index, unit.name, _UNITS_WIDTH / most) for index, unit in here],
            textposition="inside", textangle=0,
            insidetextanchor="middle", insidetextfont={"color": INK, "size": 11},
            marker={"color": [END_COLOR if index in (0, table.last) else LAYER_COLORS[unit.stage % 2]
                              for index, unit in here],
                    "line": {"color": "#fff", "width": 1.5}},
            customdata=[f"u{index} {unit.name}<br>stage {unit.stage} on pp{table.position(index)}, uses "
                        f"{' '.join(f'p{p}' for p in unit.parameters) or 'no parameters'}<br>"
                        f"{show_count(unit.forward_flops)} FLOPs forward of a micro-batch"
                        for index, unit in here],
            hovertemplate="%{customdata}<extra></extra>", showlegend=False))
    return traces


def _short(index: int, name: str, width: float) -> str:
    """As much of a unit's name as so many pixels hold: the pointer on it says the rest."""
    texts = (f"u{index} {name}", f"u{index}")
    return next((text for text in texts if len(text) * _LETTER <= width), "")


# ---------------------------------------------------------------- memory


def memory(content: Content) -> Any:
    """The bytes of a rank's device over the step, by kind of slot, with the peak marked."""
    go, make_subplots = plotly()
    rows = content.predicted.step.peaks
    positions = content.budget.spread(CURVES, "Memory over time")
    columns = min(2, len(positions))
    unit = byte_unit(fullest(rows).total)
    clock = time_unit(content.predicted.step.step_s)
    figure = make_subplots(rows=-(-len(positions) // columns), cols=columns, shared_yaxes="all",
                           horizontal_spacing=0.05, vertical_spacing=0.32 / -(-len(positions) // columns),
                           subplot_titles=[f"pp{position}: peak {show_bytes(rows[position].total)}"
                                           for position in positions])
    known: set[str] = set()
    for number, position in enumerate(positions):
        row, column = number // columns + 1, number % columns + 1
        times, kinds, highest_at = _curve(content, position)
        times = [*clock.of(times), content.predicted.step.step_s / clock.size]
        for kind, sizes in kinds:
            sizes = [*unit.of(sizes), sizes[-1] / unit.size]
            figure.add_trace(go.Scatter(
                x=times, y=sizes, name=kind, stackgroup="held", legendgroup=kind, mode="lines",
                showlegend=kind not in known, line={"width": 0, "shape": "hv"},
                fillcolor=content.colors[kind],
                hovertemplate=f"{kind} %{{y:.3g}} {unit.name} at %{{x:.4g}} {clock.name}<extra></extra>"),
                row=row, col=column)
            known.add(kind)
        peak = rows[position].total
        figure.add_trace(go.Scatter(
            x=[times[highest_at]], y=[peak / unit.size], mode="markers", name="peak", legendgroup="peak",
            showlegend=not number, marker={"symbol": "triangle-down", "size": 11, "color": "#d62728"},
            hovertemplate=f"peak {show_bytes(peak)} at %{{x:.4g}} {clock.name}<extra></extra>"),
            row=row, col=column)
    figure.update_xaxes(ticksuffix=f" {clock.name}")
    figure.update_yaxes(ticksuffix=f" {unit.name}", rangemode="tozero")
    return finish(figure, 70 + 230 * -(-len(positions) // columns),
                  margin={"l": 80, "r": 24, "t": 56, "b": 36})


def _curve(content: Content, position: int) -> tuple[list[float], list[tuple[str, list[float]]], int]:
    """Times, the bytes of each kind, and the index of the peak. Slots begin in the order of issue, so a time
    is the latest at which an instruction up to here begins."""
    fixed, moving = content.kinds(position)
    total = [sum(column) for column in zip(*moving.values())]
    chosen = sorted({0, *highest(total, POINTS)}) if total else [0]
    begun = list(accumulate(content.times(position)[0], max))
    times = [begun[index] for index in chosen]
    kinds = [(name, [float(size)] * len(chosen)) for name, size in fixed.items() if size]
    kinds += [(name, [float(sizes[i]) for i in chosen]) for name, sizes in moving.items() if any(sizes)]
    peak = max(range(len(chosen)), key=lambda at: total[chosen[at]]) if total else 0
    return times, kinds, peak


def _at_the_peak(content: Content, position: int) -> dict[str, float]:
    """Bytes by kind, when a rank of a position has most."""
    fixed, moving = content.kinds(position)
    total = [sum(column) for column in zip(*moving.values())]
    at = max(range(len(total)), key=total.__getitem__) if total else 0
    return {**fixed, **{name: sizes[at] for name, sizes in moving.items() if sizes}}


def peaks(content: Content) -> Any:
    """The peak of each position, and what it is made of."""
    go, _ = plotly()
    rows = content.predicted.step.peaks
    unit = byte_unit(fullest(rows).total)
    parts = [_at_the_peak(content, position) for position in range(len(rows))]
    figure = go.Figure([
        go.Bar(name=kind, x=[f"pp{p}" for p in range(len(rows))],
               y=unit.of([part.get(kind, 0.0) for part in parts]), marker_color=color,
               hovertemplate=f"{kind} %{{y:.3g}} {unit.name}<extra>%{{x}}</extra>")
        for kind, color in content.colors.items() if any(part.get(kind) for part in parts)])
    figure.update_yaxes(ticksuffix=f" {unit.name}")
    return finish(figure, 280, barmode="stack", margin={"l": 80, "r": 24, "t": 44, "b": 36})


# ---------------------------------------------------------------- time


def causes(content: Content) -> Any:
    """Where the time of a rank goes, a bar a position: predicted, and above it measured."""
    go, _ = plotly()
    kinds = {"predicted": content.attributed} | ({"measured": content.spent} if content.spent else {})
    rows = [(f"pp{position}", kind, kinds[kind][position])
            for position in range(len(content.attributed)) for kind in kinds]
    unit = time_unit(max(sum(row[cause] for cause in CAUSES) for _, _, row in rows))
    names = [[name for name, _, _ in rows], [kind for _, kind, _ in rows]] if content.spent else [
        name for name, _, _ in rows]
    shades = colors.of_causes()
    figure = go.Figure([
        go.Bar(orientation="h", name=HEADS[cause], y=names, x=unit.of([row[cause] for _, _, row in rows]),
               marker_color=shades[cause],
               customdata=[f"{show_seconds(row[cause])}, {row[cause] / (_total(row) or 1.0):.1%}"
                           for _, _, row in rows],
               hovertemplate=f"{HEADS[cause]}: %{{customdata}}<extra>%{{y}}</extra>")
        for cause in CAUSES if any(row[cause] > 0 for _, _, row in rows)])
    figure.update_xaxes(ticksuffix=f" {unit.name}")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return finish(figure, 100 + len(rows) * (26 if len(rows) <= 32 else 15), barmode="stack",
                  margin={"l": 120 if content.spent else 64, "r": 24, "t": 44, "b": 36})


def _total(row: dict[str, float]) -> float:
    return sum(row[cause] for cause in CAUSES)


# ---------------------------------------------------------------- bytes


def traffic(content: Content) -> Any:
    """Bytes a step that a rank sends over each axis and moves over each link between tiers."""
    go, make_subplots = plotly()
    rows = [row.summary for row in content.stages]
    links = {f"sent over {axis}": [row.sent_bytes.get(axis, 0) for row in rows] for axis in sent_over(rows)}
    links |= {f"moved on {lane}": [row.moved_bytes.get(lane, 0) for row in rows]
              for lane in sorted({lane for row in rows for lane in row.moved_bytes})}
    links = {name: sizes for name, sizes in links.items() if any(sizes)} or {"sent": [0] * len(rows)}
    columns = min(4, len(links))
    figure = make_subplots(rows=-(-len(links) // columns), cols=columns, subplot_titles=list(links),
                           horizontal_spacing=0.07, vertical_spacing=0.22)
    shades = colors.of_lanes()
    for number, (name, sizes) in enumerate(links.items()):
        unit = byte_unit(max(sizes))
        row, column = number // columns + 1, number % columns + 1
        figure.add_trace(go.Bar(x=[f"pp{p}" for p in range(len(rows))], y=unit.of(sizes), showlegend=False,
                                marker_color=shades.get(name.split()[-1], colors.OTHER),
                                hovertemplate=f"%{{x}} {name}: %{{y:.4g}} {unit.name}<extra></extra>"),
                         row=row, col=column)
        figure.update_yaxes(ticksuffix=f" {unit.name}", row=row, col=column)
    return finish(figure, 60 + 230 * -(-len(links) // columns), margin={"l": 80, "r": 24, "t": 40, "b": 36})


# ---------------------------------------------------------------- a run

CURVES_OF_RUN = (
    ("loss", 1.0, "", (("train/loss", "training", MEASURED), ("val/loss", "validation", "#e45756"))),
    ("throughput", 1.0, "/s", (("perf/tokens_per_s", "tokens a second", "#54a24b"),
                               ("perf/samples_per_s", "samples a second", "#54a24b"))),
    ("bubble", 0.01, " %", (("pipeline/bubble_measured", "measured", MEASURED),
                            ("pipeline/bubble_predicted", "predicted", PREDICTED))),
    ("gradient norm", 1.0, "", (("train/grad_norm", "before clipping", "#b279a2"),)),
)


def course(content: Content) -> Any:
    """Loss, throughput, bubble and gradient norm over the run."""
    go, make_subplots = plotly()
    rows = thin(content.rows, STEPS)
    figure = make_subplots(rows=2, cols=2, subplot_titles=[title for title, *_ in CURVES_OF_RUN],
                           horizontal_spacing=0.09, vertical_spacing=0.2)
    for number, (title, scale, suffix, curves) in enumerate(CURVES_OF_RUN):
        row, column = number // 2 + 1, number % 2 + 1
        for nth, (name, label, color) in enumerate(curves):
            points = [(each["step"], each[name] / scale) for each in rows
                      if isinstance(each.get(name), int | float)]
            if points:
                figure.add_trace(go.Scatter(
                    x=[step for step, _ in points], y=[value for _, value in points], name=label,
                    mode="lines+markers" if name == "val/loss" or len(points) < 40 else "lines",
                    line={"color": color, "width": 2}, marker={"size": 4}, showlegend=False,
                    hovertemplate=f"{title}, {label}: %{{y:.4g}}{suffix} at step %{{x}}<extra></extra>"),
                    row=row, col=column)
                if len(curves) > 1:  # names above the panel, where no curve is
                    figure.add_annotation(x=1 - 0.18 * nth, y=1.01, xref="x domain", yref="y domain",
                                          xanchor="right", yanchor="bottom", showarrow=False, text=label,
                                          font={"color": color, "size": 11}, row=row, col=column)
        figure.update_yaxes(ticksuffix=suffix, row=row, col=column)
    figure.update_xaxes(title_text="step", title_font={"size": 11, "color": FAINT})
    return finish(figure, 520, margin={"l": 80, "r": 24, "t": 40, "b": 44})

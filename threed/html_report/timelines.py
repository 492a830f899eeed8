"""Timelines: the lanes of a step as bars, predicted above measured, on one axis of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from threed.html_report.content import Content, LaneTimeline
from threed.html_report.drawing import FAINT, LINE, AxisUnit, finish, paler, plotly, time_unit
from threed.program.timeline_svg import COLORS

ROWS = 30  # of lanes that are shown at a time
NUMBERED = 1_500  # boxes up to which micro-batches are written into them
WAIT_COLOR = "#e9ebee"


class Bar(NamedTuple):
    row: int
    begin: float
    length: float
    text: str  # shown when the pointer is on it
    number: str  # written into it


class Panel(NamedTuple):
    """What one panel of a timeline shows."""

    names: list[str]
    bars: dict[tuple[str, int], list[Bar]]  # (op or wait, shade) -> its bars


def compute_lanes(content: Content) -> Any:
    """The compute lane of every position, or of some: the picture of the pipeline."""
    panels = [(timeline.title, _rows(timeline, content.budget.computed, ("compute",)))
              for timeline in _timelines(content, content.budget.computed)]
    return _draw([panels], ["all"], 24, content.predicted.step.step_s)


def all_lanes(content: Content) -> Any:
    """Every lane, of as many positions at a time as are easy to read."""
    timelines = _timelines(content, content.budget.drawn)
    lanes = {position: _lanes(timelines, position) for position in content.budget.drawn}
    groups: list[list[int]] = []
    for position, names in lanes.items():
        if not groups or sum(len(lanes[p]) for p in groups[-1]) + len(names) > ROWS:
            groups.append([])
        groups[-1].append(position)
    drawn = [[(timeline.title, _rows(timeline, group, None, lanes)) for timeline in timelines]
             for group in groups]
    return _draw(drawn, [_label(group) for group in groups], 20, content.predicted.step.step_s)


def _label(positions: Sequence[int]) -> str:
    return f"pp{positions[0]}" if len(positions) == 1 else f"pp{positions[0]} to pp{positions[-1]}"


def _timelines(content: Content, positions: Sequence[int]) -> list[LaneTimeline]:
    predicted = content.timeline(positions)
    measured = content.measured
    return [predicted] if measured is None else [predicted, measured]


def _lanes(timelines: Sequence[LaneTimeline], position: int) -> list[str]:
    """The lanes of a position in which something takes time: compute first."""
    names = {lane for timeline in timelines
             for kinds in (timeline.lanes, timeline.waits)
             for lane, items in kinds.get(position, {}).items() if items}
    return sorted(names, key=lambda lane: (lane != "compute", lane))


def _rows(timeline: LaneTimeline, positions: Sequence[int], only: Sequence[str] | None,
          lanes: dict[int, list[str]] | None = None) -> Panel:
    names: list[str] = []
    bars: dict[tuple[str, int], list[Bar]] = defaultdict(list)
    for position in positions:
        for lane in only or (lanes or {})[position]:
            row = len(names)
            names.append(f"pp{position}" if only else f"pp{position}  {lane}")
            for span in timeline.waits.get(position, {}).get(lane, ()):
                bars["wait", 0].append(Bar(row, span.begin, span.end - span.begin, span.name, ""))
            for block in timeline.lanes.get(position, {}).get(lane, ()):
                number = str(block.microbatch) if block.microbatch >= 0 else ""
                bars[str(block.op), block.microbatch % 2].append(
                    Bar(row, block.begin, block.end - block.begin, block.name, number))
    return Panel(names, bars)


def _draw(groups: list[list[tuple[str, Panel]]], labels: Sequence[str], height: int, step_s: float) -> Any:
    """A figure with a panel below another for each (title, rows) of a group. `labels`: of the groups, of
    which a menu chooses one. `height`: of a row, in pixels. `step_s`: the predicted step's time."""
    go, make_subplots = plotly()
    panels, most = len(groups[0]), max(len(rows.names) for group in groups for _, rows in group)
    tall = height * most
    figure = make_subplots(rows=panels, cols=1, shared_xaxes=True, subplot_titles=[t for t, _ in groups[0]],
                           vertical_spacing=56 / (panels * (tall + 56)))
    unit = time_unit(max((step_s, *(bar.begin + bar.length for group in groups for _, rows in group
                                    for bars in rows.bars.values() for bar in bars))))
    owner: list[int] = []  # of each trace: its group
    for number, group in enumerate(groups):
        known: set[str] = set()
        for panel, (_, rows) in enumerate(group, 1):
            traces = _traces(go, rows, unit, known)
            owner += [number] * len(traces)
            figure.add_traces(traces, rows=panel, cols=1)
    for trace, group in zip(figure.data, owner, strict=True):
        trace.visible = group == 0
    buttons = [{"label": label, "method": "update",
                "args": [{"visible": [at == number for at in owner]}, _ticks(groups[number])]}
               for number, label in enumerate(labels)]
    menu = {"buttons": buttons, "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "direction": "down",
            "bgcolor": "#fff", "bordercolor": LINE, "pad": {"b": 8}}
    figure.update_xaxes(ticksuffix=f" {unit.name}", showticklabels=True, rangemode="tozero")
    figure.update_yaxes(showgrid=False)
    finish(figure, panels * (tall + 56) + 64, barmode="overlay", bargap=0.0, dragmode="zoom",
           updatemenus=[menu] if len(groups) > 1 else [], uniformtext={"mode": "hide", "minsize": 8},
           margin={"l": 112 if height < 24 else 64, "r": 24, "t": 72, "b": 40})
    return figure.update_layout(_ticks(groups[0]))


def _ticks(group: Sequence[tuple[str, Panel]]) -> dict[str, Any]:
    """The layout of the vertical axes: the names of rows, from the top down."""
    layout: dict[str, Any] = {}
    for panel, (_, rows) in enumerate(group, 1):
        axis = f"yaxis{panel if panel > 1 else ''}"
        layout |= {f"{axis}.tickvals": list(range(len(rows.names))), f"{axis}.ticktext": rows.names,
                   f"{axis}.range": [len(rows.names) - 0.4, -0.6]}
    return layout


def _traces(go: Any, rows: Panel, unit: AxisUnit, known: set[str]) -> list[Any]:
    """A trace an op and shade. `known`: names that the legend has already."""
    import numpy

    traces, numbered = [], sum(map(len, rows.bars.values())) <= NUMBERED
    colors = {"wait": WAIT_COLOR, **{str(op): color for op, color in COLORS.items()}}
    order = list(colors)
    for op, shade in sorted(rows.bars, key=lambda key: (order.index(key[0]), -key[1])):
        bars = rows.bars[op, shade]
        traces.append(go.Bar(
            orientation="h", name=op, legendgroup=op, showlegend=op not in known,
            x=numpy.array([bar.length for bar in bars]) / unit.size,
            base=[round(bar.begin / unit.size, 6) for bar in bars],
            y=numpy.array([bar.row for bar in bars], dtype=numpy.int16), width=0.84,
            marker={"color": colors[op] if shade or op == "wait" else paler(colors[op]),
                    "line": {"width": 0.5 if numbered else 0, "color": "#fff"}},
            text=[bar.number for bar in bars] if numbered else None, textposition="inside", textangle=0,
            insidetextanchor="middle", insidetextfont={"color": "#fff", "size": 10},
            customdata=[bar.text for bar in bars],
            hovertemplate=f"%{{customdata}}<br>begins at %{{base:.4g}} {unit.name}, takes %{{x:.4g}} "
                          f"{unit.name}<extra></extra>"))
        known.add(op)
    if not traces:
        traces.append(go.Bar(orientation="h", x=[0], y=[0], showlegend=False, marker={"color": FAINT}))
    return traces

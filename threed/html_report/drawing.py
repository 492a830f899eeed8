"""Drawing: plotly, and the looks that all figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from threed.base.errors import InputError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
INK, FAINT, LINE = "#24292f", "#6e7781", "#e6e8eb"
CLEAR = "rgba(0,0,0,0)"  # the page's ground shows through: it is light or dark, as the reader's system is
NARROWEST = 900  # pixels of a figure: on a narrow screen it is scrolled, so that its texts do not touch
_LEGEND_ROW, _LEGEND_KEY, _LETTER = 19, 46, 6.2  # pixels: a row, what stands before a name, a letter of it
PREDICTED, MEASURED = "#9aa5b1", "#4c78a8"
# plotly's own bar of buttons has one that sends a figure to its cloud: a page keeps what it shows.
CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False, "showSendToCloud": False,
          "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}


class AxisUnit(NamedTuple):
    """What the numbers of an axis are divided by, and its name."""

    size: float
    name: str

    def of(self, values: Sequence[float]) -> list[float]:
        return [value / self.size for value in values]


def byte_unit(largest: float) -> AxisUnit:
    """The binary unit in which an axis up to so many bytes has readable numbers."""
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest >= 2**power:
            return AxisUnit(2.0**power, name)
    return AxisUnit(1.0, "B")


def time_unit(largest_s: float) -> AxisUnit:
    for size, name in ((1.0, "s"), (1e-3, "ms")):
        if largest_s >= 2 * size:
            return AxisUnit(size, name)
    return AxisUnit(1e-6, "us")


def plotly() -> tuple[Any, Any]:
    """plotly's graph_objects and make_subplots. InputError where it is not installed."""
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError:
        raise InputError("a report is drawn with plotly, which is not installed: pip install "
                         "plotly") from None
    return graph_objects, make_subplots


def finish(figure: Any, height: int, **layout: Any) -> Any:
    """Apply the common style to a figure. `height`: pixels, to which the rows of a long legend add."""
    figure.update_layout(
        height=height, paper_bgcolor=CLEAR, plot_bgcolor=CLEAR, hovermode="closest", bargap=0.25,
        font={"family": FONT, "size": 12, "color": INK}, margin={"l": 64, "r": 24, "t": 48, "b": 48},
        modebar={"bgcolor": CLEAR, "color": FAINT, "activecolor": MEASURED},
        hoverlabel={"bgcolor": "#fff", "bordercolor": LINE, "font": {"color": INK}},
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top",
                "bgcolor": CLEAR, "itemsizing": "constant",
                "traceorder": "normal"})
    axis = {"gridcolor": LINE, "zeroline": False, "linecolor": LINE, "title_standoff": 8,
            "tickfont": {"color": FAINT}}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.for_each_annotation(_title)
    figure.update_layout(**layout)
    more = _LEGEND_ROW * (_legend_rows(figure) - 1)
    return figure.update_layout(height=height + more, margin_t=figure.layout.margin.t + more)


def _legend_rows(figure: Any) -> int:
    """The rows of the legend of a figure of the least width: plotly gives all names the longest one's."""
    names = {trace.name for trace in figure.data if trace.name and trace.showlegend is not False}
    if not names or figure.layout.showlegend is False:
        return 1
    margin = figure.layout.margin
    width = NARROWEST - margin.l - margin.r
    return -(-len(names) // max(1, int(width / (_LEGEND_KEY + _LETTER * max(map(len, names))))))


def _title(note: Any) -> None:
    """The looks of a panel's title."""
    if not note.showarrow and note.yref == "paper":
        note.update(font={"size": 13, "color": INK}, text=f"<b>{note.text}</b>")


def paler(color: str) -> str:
    """A colour mixed with white. (A transparent one would show the lines behind it.)"""
    parts = (int(color[at:at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - 0.72 * (255 - part)):02x}" for part in parts)

"""HTML: the page, one file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from threed.base.quantity import show_bytes, show_count, show_seconds
from threed.base.version import __version__
from threed.html_report import figures, timelines
from threed.html_report.colors import GROUNDS, IDLE, rgb
from threed.html_report.content import LAST, Content
from threed.html_report.drawing import CONFIG, FONT, INK, LINE, NARROWEST, plotly
from threed.html_report.timelines import WAIT_COLOR
from threed.monitor.goodput import spent
from threed.monitor.loggers.logger import model_size
from threed.prediction.peak import fullest
from threed.prediction.report import show as show_report

BUTTONS = 24  # pixels above a figure for plotly's buttons, which would lie on its legend


def _style(color: str) -> str:
    """A colour as the browser writes it: rgb(223, 226, 230)."""
    return f"rgb({', '.join(map(str, rgb(color)))})"


# The browser itself refuses whatever would leave the page. WebGL, which plotly has and these figures do not
# use, would need 'unsafe-eval'.
POLICY = ("default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
          "img-src data: blob:; font-src data:")
# In the dark, what a figure draws in the colours of light paper (text, grid, frames of boxes, waiting) takes
# those of the page. Texts inside boxes stay as they are: the boxes keep their colours.
STYLE = f"""
:root {{ color-scheme: light dark; --ground: #f6f8fa; --card: {GROUNDS[0]}; --edge: #e1e4e8; --ink: {INK};
  --soft: #57606a; --link: #0550ae; --line: {LINE}; --wait: {WAIT_COLOR}; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #0d1117; --card: {GROUNDS[1]}; --edge: #30363d; --ink: #e6edf3; --soft: #9198a1;
    --link: #58a6ff; --line: #2b3138; --wait: #363c44; }}
  .js-plotly-plot :is([class*="tick"] text, .legendtext, text[class*="title"],
                      .annotation-text[style*="{_style(INK)}"]) {{ fill: var(--soft) !important; }}
  .js-plotly-plot :is(.gridlayer path, .crisp[class*="lines"]) {{ stroke: var(--line) !important; }}
  .js-plotly-plot :is(.bars .point path, .legendbar, .legendundefined) {{ stroke: var(--card) !important; }}
  .js-plotly-plot :is(.point path, .legendbar, .legendundefined):is([style*="{_style(WAIT_COLOR)}"],
    [style*="{_style(IDLE)}"]) {{ fill: var(--wait) !important; }}
}}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 {FONT}; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 24px 16px 64px; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }}
h2 {{ font-size: 18px; margin: 0 0 2px; }}
p {{ margin: 4px 0 8px; color: var(--soft); max-width: 110ch; }}
section, .tile, .note {{ background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }}
section {{ margin-top: 20px; padding: 16px 18px; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }}
.tile {{ padding: 10px 16px; min-width: 130px; }}
.tile b {{ display: block; font-size: 21px; font-weight: 600; }}
.tile span {{ color: var(--soft); font-size: 13px; }}
.note {{ padding: 8px 14px; margin: 8px 0; border-left: 4px solid #eeca3b; }}
pre {{ overflow-x: auto; font-size: 12.5px; background: var(--ground); padding: 10px; border-radius: 6px; }}
summary {{ cursor: pointer; color: var(--soft); }}
nav a {{ margin-right: 14px; color: var(--link); text-decoration: none; }}
.figure {{ overflow-x: auto; padding-top: {BUTTONS}px; }}
.figure .modebar-container {{ top: -{BUTTONS}px !important; }}
.figure > div {{ min-width: {NARROWEST}px; }}
@media (max-width: 600px) {{
  main {{ padding: 12px 8px 32px; }}
  section {{ padding: 12px 10px; }}
  h1 {{ font-size: 19px; }}
  .tiles {{ display: grid; grid-template-columns: 1fr 1fr; }}
  .tile {{ padding: 8px 12px; min-width: 0; }}
}}
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style>
<script>{script}</script></head>
<body><main>{body}</main></body></html>
"""


def page(content: Content) -> str:
    """The page as text. InputError where plotly is not installed."""
    plotly()
    from plotly.offline import get_plotlyjs

    drawn = [_section(content, *section) for section in _sections(content)]  # which may add notes
    names = [(name, title) for name, title, *_ in _sections(content)]
    notes = [f'<div class="note">{escape(note)}</div>' for note in dict.fromkeys(content.notes)]
    body = [_head(content), *notes,
            "<nav>" + "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title in names) + "</nav>",
            *drawn, _numbers(content)]
    return PAGE.format(policy=POLICY, title=escape(_title(content)), style=STYLE, script=get_plotlyjs(),
                       body="\n".join(body))


Section = tuple[str, str, str, tuple[Callable[[Content], Any], ...]]


def _sections(content: Content) -> list[Section]:
    """(name, title, what is to be seen, figures) of each section."""
    measured = content.measured is not None
    both = ("the predicted step above, a measured one below, with one axis" if measured else
            "the predicted step")
    sections: list[Section] = [
        ("mesh", "Mesh, stages and units",
         "A row a pipeline position. Ranks of one position run the same program; shades alternate with the "
         "replica. A unit is computed as one; shades alternate with the stage.", (figures.units,)),
        ("pipeline", "The pipeline",
         f"What each position computes, and when: {both}. What is left blank is the bubble. Draw a frame to "
         "zoom, double click to see all again; shades alternate with the micro-batch.",
         (timelines.compute_lanes,)),
        ("lanes", "Every lane",
         "A lane is a queue of work of one rank: computing, collectives over dp, messages to one peer, "
         "copies to and from the host and the disk. Here is "
         f"{both}; lanes in which nothing takes time are left out"
         f"{', and pale grey is waiting' if measured else ''}.", (timelines.all_lanes,)),
        ("time", "Where the time goes",
         "Of a step, on a rank of each position. Idle is waiting for the last rank before the optimizer's "
         "step, and the host between instructions."
         + (f" Measured: the mean of the last {len(content.last)} steps." if content.spent else ""),
         (figures.causes,)),
        ("memory", "Memory",
         "Predicted bytes on the device of a rank: what it holds all the time, what comes and goes, "
         "temporaries inside an operation, on a GPU what CUDA and NCCL take; the triangle marks the peak.",
         (figures.peaks, figures.memory)),
        ("bytes", "Bytes on each axis and link",
         "What a rank of each position sends in a step over each axis of the mesh, and moves between device, "
         "host and disk. Each panel has a scale of its own.", (figures.traffic,)),
    ]
    if content.rows:
        sections.insert(1, ("run", "The run", f"{len(content.rows)} steps, as logged in metrics.jsonl.",
                            (figures.course,)))
    return sections


def _section(content: Content, name: str, title: str, about: str,
             draw: tuple[Callable[[Content], Any], ...]) -> str:
    drawn = [each(content).to_html(full_html=False, include_plotlyjs=False, config=CONFIG,
                                   div_id=f"{name}-{number}") for number, each in enumerate(draw)]
    shown = "".join(f'<div class="figure">{each}</div>' for each in drawn)
    return f'<section id="{name}"><h2>{escape(title)}</h2><p>{escape(about)}</p>{shown}</section>'


def _title(content: Content) -> str:
    """What the page is about: a run's folder, or a model and how it is run."""
    config = content.config
    what = str(content.run.path) if content.run else config.model.name or f"{config.model.layers} layers"
    return f"{what}: {config.parallel.schedule}, ZeRO {config.zero.stage}, {content.mesh.text()}"


def _head(content: Content) -> str:
    config, predicted, step = content.config, content.predicted, content.predicted.step
    parallel = config.parallel
    tiles = [("step, predicted", show_seconds(step.step_s)),
             ("bubble, predicted", f"{step.bubble:.1%}"),
             ("peak of a device, predicted", show_bytes(fullest(step.peaks).total)),
             ("ranks: " + content.mesh.text(), f"{content.mesh.size:,}"),
             (f"micro-batches, {parallel.schedule}", f"{config.num_microbatches:,}"),
             ("parameters", show_count(model_size(config))),
             (f"{predicted.counted} a second, predicted", show_count(predicted.rate))]
    if predicted.mfu is not None and not content.on_cpu:
        tiles.append(("MFU, predicted", f"{predicted.mfu:.1%}"))
    measured = (("perf/step_s", "step, measured", show_seconds),
                ("pipeline/bubble_measured", "bubble, measured", lambda share: f"{share:.1%}"),
                ("perf/tokens_per_s", "tokens a second, measured", show_count),
                ("perf/samples_per_s", "samples a second, measured", show_count),
                ("memory/peak_bytes", "peak of the largest rank, measured"
                 + ": its process, with all libraries" * content.on_cpu, show_bytes),
                ("train/loss", f"loss, mean of the last {min(LAST, len(content.last))} steps",
                 lambda loss: f"{loss:.4f}"))
    for name, label, text in measured if content.rows else ():
        if (value := content.mean(name)) is not None:
            tiles.append((label, text(value)))
    if content.run and (time := spent(content.run.path)) is not None:
        tiles.append(("goodput: steps that count, of the time since the run began", f"{time.goodput:.1%}"))
    return (f"<h1>{escape(_title(content))}</h1><p>{escape(show_report(predicted).splitlines()[0])}; plan "
            f"{step.digest}, threed {__version__}</p>"
            '<div class="tiles">' + "".join(f'<div class="tile"><b>{escape(text)}</b><span>{escape(label)}'
                                            "</span></div>" for label, text in tiles) + "</div>")


def _numbers(content: Content) -> str:
    """The same as text."""
    return ('<section id="numbers"><h2>Numbers</h2><p>What `threed predict` prints for this plan, and its '
            f"mesh.</p><pre>{escape(show_report(content.predicted))}</pre>{_spent(content)}<details><summary>"
            f"the mesh</summary><pre>{escape(content.mesh.draw())}</pre></details></section>")


def _spent(content: Content) -> str:
    """What the time of the run went into."""
    found = spent(content.run.path) if content.run else None
    if found is None:
        return ""
    return ("<p>What the time since the run began went into, over all of its starts: "
            f"{escape(found.text())}.</p>")

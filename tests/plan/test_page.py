"""The page of `threed report`: one file, and the numbers of the plan, its walk and its report."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import numpy
import pytest

import threed
from threed.base.errors import InputError
from threed.cli.main import app
from threed.html_report import budget, colors, figures, html, timelines
from threed.html_report.content import Content, thin
from threed.html_report.drawing import byte_unit, finish, plotly, time_unit
from threed.html_report.report import content
from threed.monitor.attribute import CAUSES
from threed.prediction.predict import predicted
from threed.prediction.report import show
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Op
from threed.program.summary import activations
from threed.program.timeline_svg import COLORS

OFFLOADED = ["zero.stage=3", "parallel.pp=4", "parallel.schedule=zb-v", "parallel.dp=2", "parallel.tp=1",
             "model.layers=14", "offload.optimizer=cpu", "offload.parameters=cpu"]


@pytest.fixture(scope="module", params=[[], OFFLOADED], ids=["toy", "offloaded"])
def toy(request) -> Content:
    return content(threed.load("configs/toy.yaml", request.param))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("page") / "page.html"
    assert threed.report(threed.load("configs/toy.yaml"), file) == file
    assert not list(file.parent.glob("*.tmp"))
    return file.read_text()


def test_one_file(text):
    """Nothing is loaded from anywhere, which the browser enforces, too."""
    own = re.sub(r"<script>/\*\*.*?</script>", "", text, count=1, flags=re.S)  # without plotly.js
    assert len(own) < len(text) / 10 and "plotly.js" in text
    assert "http://" not in own and "https://" not in own and "<link" not in own and "import(" not in own
    assert not re.search(r"<(script|img|iframe|link)[^>]*\s(src|href)=", text)
    assert "Content-Security-Policy" in own and "default-src 'none'" in own and "unsafe-eval" not in own
    assert own.count('"showSendToCloud": false') == 7
    assert len(text) < 7_000_000


def test_light_dark_and_narrow(text):
    """Figures have no ground of their own, and text and lines have the colours of the page in the dark."""
    own = text.replace("\n", " ")
    assert "prefers-color-scheme: dark" in own and "color-scheme: light dark" in own
    assert re.search(r'annotation-text\[style\*="rgb\(36, 41, 47\)"\]', own)  # INK, as the browser writes it
    assert '"paper_bgcolor":"rgba(0,0,0,0)"' in own and '"plot_bgcolor":"#fff"' not in own
    assert own.count('<div class="figure">') == 7 and ".figure { overflow-x: auto;" in own
    # plotly's buttons lie above a figure, where its legend is not
    assert "padding-top: 24px" in own and ".modebar-container { top: -24px !important; }" in own


def test_one_colour_a_kind(toy):
    """A kind of bytes has the same name and colour in the bars of peaks and in the curves of memory."""
    bars = {trace.name: trace.marker.color for trace in figures.peaks(toy).data}
    curves = {trace.name: trace.fillcolor for trace in figures.memory(toy).data if trace.name != "peak"}
    assert set(bars) <= set(curves) and "saved for the backward" in bars
    assert {name: curves[name] for name in bars} == bars and len(set(bars.values())) == len(bars)


PLANS = {"experts": ("configs/toy-moe.yaml", ["parallel.schedule=dualpipe-v", "parallel.pair=true",
                                              "activation.policy=full"]),
         "handing": ("configs/toy.yaml", ["model.family=tests/families/handing.py:HANDING"]),
         "parts": ("configs/toy.yaml", ["parallel.schedule=zb-h1", "activation.policy=full",
                                        "activation.partition=true", "parallel.sequence_parallel=true"])}


@pytest.mark.parametrize("name", PLANS)
def test_kinds_have_colours_apart(name):
    """What stands in one figure of memory has a name and a colour of its own, which an eye tells from the
    others and from the page, light or dark; and no figure has the name of a slot in it."""
    path, overrides = PLANS[name]
    page = content(threed.load(path, overrides))
    drawn = {trace.name: trace.fillcolor for trace in figures.memory(page).data if trace.name != "peak"}
    assert drawn == {name: page.colors[name] for name in drawn} and len(drawn) > 8
    kinds = activations(page.plan.table)
    assert not drawn.keys() & {*kinds} and len(page.colors) == len(colors.FIXED) + len(kinds) + 1
    _assert_apart([*drawn.values(), *colors.GROUNDS], 0.06)


def test_colours_apart(monkeypatch):
    """The same of instructions, and of causes of time, also where a family's axis adds one. Of thirty
    tensors that a family hands on, none has the colour of another."""
    _assert_apart([*COLORS.values(), timelines.WAIT_COLOR], 0.05)
    monkeypatch.setattr(colors, "CAUSES", (*CAUSES, "fp_wait", "xp_wait"))
    _assert_apart([*colors.of_causes().values()], 0.06)
    many = colors.spread(colors.FIXED, [f"t{number}" for number in range(30)])
    _assert_apart([many[f"t{number}"] for number in range(30)], 0.06)


def _assert_apart(drawn, least):
    places = colors.oklab([colors.rgb(color) for color in drawn])
    for (one, here), (other, there) in itertools.combinations(zip(drawn, places, strict=True), 2):
        assert numpy.linalg.norm(here - there) > least, (one, other)


@pytest.mark.parametrize(("names", "rows"), [(["loss"], 1), (["a" * 20] * 30, 1),
                                             ([f"{n:030}" for n in range(7)], 3)])
def test_room_for_the_legend(names, rows):
    """A figure is as much taller as its legend has rows more than one, and its panels stay as large."""
    go, _ = plotly()
    figure = go.Figure([go.Bar(name=name, x=["pp0"], y=[1]) for name in names])
    finish(figure, 300, margin={"l": 80, "r": 24, "t": 44, "b": 36})
    assert figure.layout.height - figure.layout.margin.t == 300 - 44
    assert figure.layout.margin.t == 44 + 19 * (rows - 1)


def test_what_must_be_seen(text):
    """What `threed predict` prints, all sections, and no section of a run."""
    found = predicted(threed.load("configs/toy.yaml"))
    assert show(found).splitlines()[0] in text and found.step.digest in text
    for name in ("mesh", "pipeline", "lanes", "time", "memory", "bytes", "numbers"):
        assert f'<section id="{name}">' in text
    assert '<section id="run">' not in text and "measured" not in text.split("plotly.js")[0]
    assert "pp 2 x dp 2 x tp 2" in text and "u3 blocks.2" in text


def test_compute_lanes(toy):
    """The boxes of a position take as long as `threed predict` says that it is busy, and none after the end
    of the step. (Boxes of one micro-batch join across short waits.)"""
    step, unit = toy.predicted.step, time_unit(toy.predicted.step.step_s)
    drawn = dict.fromkeys(range(toy.mesh.positions), 0.0)
    for trace in timelines.compute_lanes(toy).data:
        assert max(numpy.add(trace.base, trace.x)) * unit.size <= step.step_s * 1.0001
        if trace.name in {str(op) for op in (*COMPUTE, Op.STEP)}:
            for row, length in zip(trace.y, trace.x, strict=True):
                drawn[int(row)] += length * unit.size
    assert list(drawn.values()) == pytest.approx([row.busy_s for row in step.stages], rel=0.01)


def test_all_lanes(toy):
    """Each lane of each position that takes time is a row; a menu shows as many positions as are easy to
    read, and what is hidden is there."""
    figure, wanted = timelines.all_lanes(toy), set()
    for position, links in enumerate(Analysis(toy.plan).simulated("train")):
        walk = toy.priced.step.walk
        wanted |= {f"pp{position}  {form.effect.lane}" for index, form in enumerate(links.forms)
                   if walk.end[position][index] > walk.start[position][index]}
    menus = figure.layout.updatemenus
    rows = [button.args[1]["yaxis.ticktext"] for menu in menus for button in menu.buttons]
    rows = rows or [figure.layout.yaxis.ticktext]
    assert {name for names in rows for name in names} == wanted
    assert max(map(len, rows)) <= timelines.ROWS and bool(menus) == (len(wanted) > timelines.ROWS)
    shown = sum(len(trace.x) for trace in figure.data if trace.visible)
    assert 0 < shown <= sum(len(trace.x) for trace in figure.data)
    assert (shown == sum(len(trace.x) for trace in figure.data)) == (not menus)


def test_memory(toy):
    """The curves of a position add up to its peak, once it is reached, and never to more."""
    figure, peaks = figures.memory(toy), [row.peak.total for row in toy.stages]
    unit = byte_unit(max(peaks))
    for position, peak in enumerate(peaks):
        axis = f"x{position + 1 if position else ''}"
        curves = [trace for trace in figure.data if trace.xaxis == axis and trace.stackgroup]
        assert min(min(trace.y) for trace in curves) >= 0
        total = numpy.sum([trace.y for trace in curves], axis=0) * unit.size
        assert total.max() == pytest.approx(peak) and (numpy.diff(curves[0].x) >= 0).all()
        (mark,) = (trace for trace in figure.data if trace.xaxis == axis and trace.name == "peak")
        at = list(curves[0].x).index(mark.x[0])
        assert max(total[at:][numpy.array(curves[0].x)[at:] == mark.x[0]]) == pytest.approx(peak)
    assert min(min(trace.y) for trace in figures.peaks(toy).data) >= 0
    bars = numpy.sum([trace.y for trace in figures.peaks(toy).data], axis=0) * unit.size
    assert list(bars) == pytest.approx(peaks)
    assert max(size for _, size in toy.stages[0].memory) == peaks[0]


def test_causes_and_bytes(toy):
    """A bar is as long as the step, and bytes are those of `threed check`."""
    for row in toy.attributed:
        assert sum(row[cause] for cause in CAUSES) == pytest.approx(toy.predicted.step.step_s)
    assert {trace.name for trace in figures.causes(toy).data} <= {"compute", "p2p wait", "dp wait",
                                                                  "optimizer", "offload", "idle"}
    sent = [row.summary.sent_bytes["pp"] for row in toy.stages]
    figure = figures.traffic(toy)
    titles = [note.text.strip("</b>") for note in figure.layout.annotations]
    trace = figure.data[titles.index("sent over pp")]
    assert list(numpy.array(trace.y) * byte_unit(max(sent)).size) == pytest.approx(sent)
    moved = {lane for row in toy.stages for lane in row.summary.moved_bytes}
    assert {f"moved on {lane}" for lane in moved} <= set(titles)


def test_units(toy):
    """Each unit is at its position, and each rank in the row of its own."""
    figure, table = figures.units(toy), toy.plan.table
    drawn = {text.split()[0]: int(row) for trace in figure.data if trace.type == "bar"
             for text, row in zip(trace.text, trace.y, strict=True) if text.startswith("u")}
    assert drawn == {f"u{index}": table.position(index) for index in range(len(table.units))}
    (ranks,) = (trace for trace in figure.data if trace.type == "heatmap")
    for position, row in enumerate(ranks.customdata):
        assert {toy.mesh.coordinate(int(rank)).position for rank in row} == {position}
    assert sorted(numpy.array(ranks.customdata).flat) == list(range(toy.mesh.size))


def test_large_plans(monkeypatch):
    """A part of the positions and micro-batches is drawn, and a note says which."""
    monkeypatch.setattr(budget, "MOST_BOXES", 700)
    monkeypatch.setattr(budget, "MOST_COMPUTED", 300)
    monkeypatch.setattr(figures, "CURVES", 3)
    large = content(threed.load("configs/toy.yaml", ["parallel.pp=8", "model.layers=14", "parallel.dp=1",
                                                     "parallel.tp=1", "train.micro_batch_size=1",
                                                     "train.global_batch_size=48"]))
    page = html.page(large)
    notes = "\n".join(large.notes)
    assert "All lanes: 2 of 8 positions are drawn (pp0, pp7)" in notes and "Compute lanes: 3 of 8" in notes
    assert "Memory over time: 3 of 8 positions are drawn (pp0, pp4, pp7)" in notes
    assert all(note in page for note in large.notes)
    monkeypatch.setattr(budget, "MOST_BOXES", 300)
    fewer = content(large.config)
    assert fewer.timeline([0]).lanes[0] and re.search("Micro-batches 0 to [0-9]+ of 48", fewer.notes[0])


def test_thin():
    rows = [{"step": step} for step in range(1, 1001)]
    chosen = [row["step"] for row in thin(rows, 300)]
    assert chosen[0] == 1 and chosen[-1] == 1000 and len(chosen) <= 301 and thin(rows[:5], 300) == rows[:5]


def report(*argv: object) -> None:
    app(["report", *map(str, argv)], standalone_mode=False)


def test_command(tmp_path, monkeypatch, capsys):
    """Costs and hardware are those of `threed predict`."""
    report("configs/toy.yaml", "parallel.pp=4", "-o", tmp_path / "page.html", "--hardware", "tflops=989")
    assert f"wrote {tmp_path / 'page.html'}: " in capsys.readouterr().out
    found = predicted(threed.load("configs/toy.yaml", ["parallel.pp=4"]), "tflops=989")
    assert show(found) in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("argv", "words"), [
    (["configs/none.yaml"], "configs/none.yaml"),
    (["configs/toy.yaml", "parallel.pp=30"], "parallel.pp=30"),
    (["{tmp}"], "config.json: there is none"),
    (["{tmp}", "parallel.pp=4"], "is the folder of a run, which has its config already"),
    (["configs/toy.yaml", "-o", "{tmp}/no/page.html"], "there is no folder"),
    (["configs/toy.yaml", "-o", "{tmp}"], "is a folder; give a file in it"),
    (["configs/toy.yaml", "-o", "{tmp}/" + "a" * 300], "File name too long"),
    (["configs/toy.yaml", "--costs", "{tmp}/none.json"], "there are no measured costs"),
    (["configs/toy.yaml", "--hardware", "tflops=no"], "hardware=tflops=no"),
])
def test_bad_input(argv, words, tmp_path, monkeypatch):
    """One message, and no file."""
    here = Path.cwd()
    monkeypatch.chdir(tmp_path)
    argv = [str(here / word) if word == "configs/toy.yaml" else word.format(tmp=tmp_path) for word in argv]
    with pytest.raises(InputError, match=re.escape(words)):
        report(*argv)
    assert not list(tmp_path.iterdir())


def test_without_plotly(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(InputError, match=re.escape("pip install plotly")):
        report("configs/toy.yaml", "-o", tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_wrong_types(tmp_path):
    for what in (3, None, ["configs/toy.yaml"]):
        with pytest.raises(InputError, match="what is of type"):
            threed.report(what, tmp_path / "page.html")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="there is no such run"):
        threed.report(tmp_path / "none", tmp_path / "page.html")

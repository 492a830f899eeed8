"""Traces of real runs: their files, `threed trace`, `threed compare`, costs.json, and the picture in
wandb."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from xml.etree import ElementTree

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.browser import Browser, figures, texts
from tests.running import Run, metrics, wandb_records
from threed.base.errors import InputError
from threed.base.quantity import show_seconds
from threed.cli.main import app
from threed.html_report import timelines
from threed.html_report.report import content
from threed.monitor.attribute import CAUSES, OF_SOME
from threed.monitor.traces import COLUMNS, read_run
from threed.planner import make_plan
from threed.planner.from_config import load_config
from threed.program.costs import load_costs, read_costs
from threed.program.effects import effects
from threed.program.instruction import Op

TOY = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.seq_len=32",
       "model.vocab=300",
       "train.global_batch_size=8", "train.micro_batch_size=1", "train.eval_every=0",
       "monitor.wandb=disabled",
       "optimizer.warmup_steps=0", "train.steps=9"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory, cache):
    """8 ranks, 9 steps, every second one traced, a picture of step 4."""
    folder = tmp_path_factory.mktemp("traced")
    run = Run(folder, *TOY, *cache, f"run.dir={folder / 'run'}", "monitor.trace_every=2",
              "monitor.timeline_every=4",
              "monitor.wandb=offline")
    assert run.wait() == 0, run.output
    return folder / "run"


@pytest.fixture
def copy(traced, tmp_path):
    """A copy of the traced run, for damage."""
    shutil.copytree(traced / "trace", tmp_path / "run" / "trace")
    for name in ("config.json", "costs.json"):
        shutil.copy(traced / name, tmp_path / "run")
    return tmp_path / "run"


def command(*argv: object) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        app([str(word) for word in argv], standalone_mode=False)
    return output.getvalue()


def test_files(traced):
    """A file a rank that explains itself: every instruction of its program, its times in order, of the steps
    asked for."""
    plan = make_plan(load_config(traced))
    names = [f"rank-{rank:05d}.jsonl" for rank in range(8)]
    assert sorted(path.name for path in (traced / "trace").iterdir()) == names
    for rank, name in enumerate(names):
        header, *lines = map(json.loads, (traced / "trace" / name).read_text().splitlines())
        position, program = header["pp"], plan.programs["train"][header["pp"]]
        assert (header["rank"], header["world_size"], header["digest"]) == (rank, 8, plan.digest)
        assert tuple(header["columns"]) == COLUMNS
        assert [row[0] for row in header["train"]] == [str(item) for item in program]
        lanes = [effects(item, plan.table, position).lane for item in program]
        assert [row[1] for row in header["train"]] == lanes
        assert [line["step"] for line in lines] == [2, 4, 6, 8, 9]
        for line in lines:
            before = 0.0
            for times in zip(line["issued"], line["started"], line["ended"], strict=True):
                assert before <= times[0] <= times[1] <= times[2]
                before = times[2]
            assert before <= line["total_s"] and len(line["issued"]) == len(program)
            assert {source for _, source, _ in line["waits"]} <= {
                index for index, item in enumerate(program) if item.op in (Op.RECV, Op.GATHER, Op.REDUCE)}


def test_costs(traced):
    """Mean seconds of each op of each unit, at its position; what `load_costs` gives."""
    plan = make_plan(load_config(traced))
    costs, digest, steps = read_costs(traced)
    assert costs == load_costs(traced / "costs.json") and digest == plan.digest and steps == 5
    expected = {(position, item.op, item.unit) for position, program in enumerate(plan.programs["train"])
                for item in program if item.op in (Op.FORWARD, Op.BACKWARD, Op.STEP, Op.CLIP)}
    assert costs.keys() == expected and all(0 < seconds < 10 for seconds in costs.values())


def test_merged_trace(traced, tmp_path):
    """Chrome's format: every instruction of every rank and step, waits before them, one clock."""
    file = tmp_path / "trace.json"
    assert f"wrote {file}: 8 ranks, 5 steps" in command("trace", traced, "-o", file)
    events = json.loads(file.read_text())["traceEvents"]
    plan = make_plan(load_config(traced))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names[5] == "rank 5 pp1 dp0 tp1" and len(names) == 8
    complete = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in complete) == 0 and min(event["dur"] for event in complete) >= 0
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
             if event["name"] == "thread_name"}
    for rank in range(8):
        position = rank // 4
        for step in (2, 4, 6, 8, 9):
            mine = [event for event in complete if event["pid"] == rank and event["args"]["step"] == step]
            ran = sorted((event for event in mine if event["cat"] != "wait"),
                         key=lambda event: event["args"]["index"])
            program = plan.programs["train"][position]
            assert [event["name"] for event in ran] == [str(item) for item in program]
            assert [lanes[rank, event["tid"]] for event in ran] == [
                effects(item, plan.table, position).lane for item in program]
            assert any(event["name"].startswith("wait RECV act" if position else "wait RECV grad")
                       for event in mine)
    ends = {(event["args"]["step"], round(event["ts"] + event["dur"], 0)) for event in complete
            if event["name"] == "CLIP"}
    assert len(ends) <= 2 * 5  # one moment a step, to a microsecond's rounding
    lanes_of: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in complete:
        begin, end = (round(time * 10) for time in (event["ts"], event["ts"] + event["dur"]))
        lanes_of.setdefault((event["pid"], event["tid"]), []).append((begin, end))
    for spans in lanes_of.values():  # Perfetto drops what begins before its neighbour ends
        spans.sort()
        assert all(first[1] <= then[0] for first, then in zip(spans, spans[1:]))
    one = tmp_path / "one.json"
    command("trace", traced, "-o", one, "--step", 6)
    assert {event["args"]["step"] for event in json.loads(one.read_text())["traceEvents"]
            if event["ph"] == "X"} == {6}


def test_picture_of_a_step(traced, tmp_path):
    """One row a position, with every FORWARD and BACKWARD in it."""
    assert "step 9" in command("trace", traced, "--svg", tmp_path / "last.svg")
    assert not (traced / "trace.json").exists()
    command("trace", traced, "--svg", tmp_path / "one.svg", "--step", 4)
    text = (tmp_path / "one.svg").read_text()
    ElementTree.fromstring(text)
    plan = make_plan(load_config(traced))
    for program in plan.programs["train"]:
        for item in program:
            if item.op in (Op.FORWARD, Op.BACKWARD):
                # neighbouring units are one block
                drawn = rf"<title>{item.op} u\d+ m{item.microbatch}( to u\d+)?</title>"
                assert re.search(drawn, text), item
    assert "pp0" in text and "pp1" in text


def test_compare(traced):
    """Predicted beside measured, and a rank's parts add up to its step."""
    comparison = json.loads(command("compare", traced, "--json"))
    assert set(comparison) >= {"digest", "steps", "step", "stages", "ranks", "ops", "lanes", "units"}
    assert set(comparison["steps"]) < {2, 4, 6, 8, 9} and len(comparison["steps"]) == 3
    rows = [*comparison["ranks"],
            *(stage[kind] for stage in comparison["stages"] for kind in ("predicted", "measured"))]
    for row in rows:
        assert sum(row[cause] for cause in CAUSES) == pytest.approx(row["step"], rel=0.01)
        assert min(row[cause] for cause in CAUSES) >= -1e-6
    assert [row["rank"] for row in comparison["ranks"]] == list(range(8))
    assert 0 < comparison["step"]["predicted"] <= comparison["step"]["measured"] * 1.05
    for op in ("FORWARD", "BACKWARD", "STEP"):
        seconds = comparison["ops"][op]
        assert seconds["predicted"] == pytest.approx(seconds["measured"], rel=1e-3)
    lanes = {"compute", "dp", "recv act", "recv grad", "send act", "send grad", "tie"}
    assert set(comparison["lanes"]) == lanes
    assert comparison["units"].keys() == {"u0", "u1", "u2", "u3", "p1", "p2", "p3", "p4"}
    text = command("compare", traced)
    assert "the times of compute and STEP are the measured ones" in text
    for words in ("where the time of a rank went", "p2p wait", "rank 7 pp1 dp1 tp1", "BACKWARD", "recv act",
                  "blocks.1"):
        assert words in text


def test_metrics_and_wandb(traced):
    """The attribution of each stage is logged at each step; wandb holds the picture of step 4 and of step
    8."""
    rows = metrics(traced)
    assert len(rows) == 9
    for row in rows[1:]:  # ranks begin the first step at times of their own
        for stage in (0, 1):
            parts = [row[f"time/{cause}/{stage}"] for cause in CAUSES if cause not in OF_SOME]
            # which is the slowest rank's
            assert min(parts) >= 0 and 0 < sum(parts) <= 1.001 * row["perf/step_s"]
    pictures = list((traced / "wandb").glob("offline-run-*/files/media/html/timeline_*.html"))
    assert len(pictures) == 2
    assert all("<svg" in path.read_text() and "FORWARD u0 m0" in path.read_text() for path in pictures)


def test_page_of_a_run(traced, tmp_path):
    """The run ends with its page, which wandb gets as well; the same command draws it again."""
    page = (traced / "report.html").read_text()
    (media,) = (traced / "wandb").glob("offline-run-*/files/media/html/report_*.html")
    assert media.read_text() == page
    (artifact,) = [item["artifact"] for item in wandb_records(traced) if item.get("type") == "artifact"]
    assert artifact["name"].startswith("report-") and "threed report" in artifact["description"]
    assert f"wrote {tmp_path / 'page.html'}" in command("report", traced, "-o", tmp_path / "page.html")
    values = json.loads(command("predict", "configs/toy.yaml", *TOY[2:], "--costs", traced, "--json"))
    text = (tmp_path / "page.html").read_text()
    assert f"step {show_seconds(values['step_time'])}, bubble" in text and values["digest"] in text
    for name in ("run", "mesh", "pipeline", "lanes", "time", "memory", "bytes"):
        assert f'<section id="{name}">' in text
    assert "with free messages" in text and "step, measured" in text and "the last 8 steps" in text


def test_measured_beside_predicted(traced):
    """The page's timeline has the boxes of a traced step, and its causes are the metrics'."""
    found, all_ranks = content(traced), read_run(traced)
    measured, rows = found.measured, found.rows
    assert measured is not None and re.search(r"measured in step [24689], on the ranks", measured.title)
    step = int(re.findall("step ([0-9]+)", measured.title)[0])
    for rank in (0, 4):
        traced_rank = all_ranks.ranks[rank]
        trace = traced_rank.trace(step)
        busy = sum(trace.ended[index] - trace.started[index] for index, item in enumerate(traced_rank.program)
                   if item.op in (Op.FORWARD, Op.BACKWARD))
        drawn = sum(block.end - block.begin for block in measured.lanes[rank // 4]["compute"]
                    if block.op in (Op.FORWARD, Op.BACKWARD))
        assert busy <= drawn * 1.0001 <= 1.1 * busy
        waited = sum(span.end - span.begin for spans in measured.waits[rank // 4].values() for span in spans)
        assert waited == pytest.approx(sum(wait.wait_s for wait in trace.waits), rel=0.01, abs=1e-5)
    assert found.spent is not None
    for position, row in enumerate(found.spent):
        for cause in (each for each in CAUSES if each not in OF_SOME):
            mean = sum(each[f"time/{cause}/{position}"] for each in rows[1:]) / (len(rows) - 1)
            assert row[cause] == pytest.approx(mean)
    assert len(timelines.compute_lanes(found).layout.annotations) == 2  # a title above each panel


def test_page_without_traces(traced, copy):
    """What is missing is said, and the rest is drawn."""
    shutil.copy(traced / "metrics.jsonl", copy)
    shutil.rmtree(copy / "trace")
    (copy / "costs.json").unlink()
    command("report", copy)
    text = (copy / "report.html").read_text()
    assert "No measured timeline: " in text and "No measured costs: no step was traced" in text
    assert '<section id="run">' in text and "costs: " in text
    (copy / "metrics.jsonl").unlink()
    command("report", copy, "-o", copy / "less.html")
    text = (copy / "less.html").read_text()
    assert "No metrics: " in text and '<section id="run">' not in text


@pytest.mark.parametrize("what", ["run", "plan"])
def test_in_a_browser(what, traced, tmp_path):
    """The page opens without an error, draws all figures, and shows what it must."""
    browser, file = Browser(tmp_path / "browser"), tmp_path / "page.html"
    argv = [traced] if what == "run" else ["configs/toy.yaml"]
    costs = ["--costs", traced] if what == "run" else []
    command("report", *argv, "-o", file)
    document, console = browser.open(file)
    assert console == [] and figures(document) == (8 if what == "run" else 7)
    seen = re.sub(r"\s+", " ", " ".join(texts(document)))
    predicted = command("predict", "configs/toy.yaml", *(TOY[2:] if what == "run" else []), *costs)
    assert predicted.splitlines()[0] in seen
    words = ["Mesh, stages and units", "u1 blocks.0", "pp0 compute", "FORWARD", "BACKWARD", "dp wait",
             "optimizer state", "sent over tp"]
    words += ["measured in step", "gradient norm", "KiB"] if what == "run" else ["MiB"]
    assert not [word for word in words if word not in seen]
    assert document.count('class="point"') > (200 if what == "run" else 60)


def test_resume_appends(cache, tmp_path):
    """Steps after a resume come after those before it; half a line is cut; other steps' costs are kept."""
    overrides = [*TOY, *cache, f"run.dir={tmp_path / 'run'}", "parallel.dp=1", "parallel.tp=1",
                 "optimizer.decay_steps=9"]
    run = Run(tmp_path, *overrides, "train.steps=3", "monitor.trace_every=1")
    assert run.wait() == 0, run.output
    with (tmp_path / "run" / "trace" / "rank-00001.jsonl").open("a") as file:
        file.write('{"step":4,"prog')
    assert read_run(tmp_path / "run").notes and read_costs(tmp_path / "run")[2] == 2  # without step 1
    again = Run(tmp_path, *overrides, "train.steps=5", "monitor.trace_every=1")
    assert again.wait() == 0, again.output
    traced = read_run(tmp_path / "run")
    assert traced.steps == [1, 2, 3, 4, 5] and not traced.notes
    assert all(rank.first_steps == {1, 4} for rank in traced.ranks)
    assert read_costs(tmp_path / "run")[2] == 3  # without step 4
    comparison = json.loads(command("compare", tmp_path / "run", "--json"))
    assert set(comparison["steps"]) <= {2, 3, 5}


def test_none_is_none(cache, tmp_path):
    run = Run(tmp_path, *TOY, *cache, f"run.dir={tmp_path / 'run'}", "parallel.dp=1", "parallel.tp=1",
              "train.steps=2",
              "monitor.trace_every=0")
    assert run.wait() == 0, run.output
    assert not (tmp_path / "run" / "trace").exists() and not (tmp_path / "run" / "costs.json").exists()
    with pytest.raises(InputError, match=r"monitor\.trace_every > 0"):
        command("compare", tmp_path / "run")


@pytest.mark.parametrize(("damage", "words"), [
    ("no run", "there is no such run"), ("no trace", "there is no trace/rank-00000.jsonl"),
    ("a rank", "rank-00005.jsonl is missing"), ("header", "rank-00003.jsonl, line 1 is damaged"),
    ("line", "rank-00003.jsonl, line 3 is damaged"), ("times", "has not one time for each"),
    ("empty", "rank-00000.jsonl has no header"), ("binary", "rank-00003.jsonl cannot be read")])
def test_damaged_traces(damage, words, copy, tmp_path):
    """One message that says which file, and for both commands."""
    folder = copy / "trace"
    file = folder / "rank-00003.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    if damage in ("no run", "no trace"):
        shutil.rmtree(copy if damage == "no run" else folder)
    elif damage == "a rank":
        (folder / "rank-00005.jsonl").unlink()
    elif damage == "header":
        file.write_text("".join([lines[0].replace('"digest"', '"digits"'), *lines[1:]]))
    elif damage == "line":
        file.write_text("".join([*lines[:2], lines[2][:200] + "\n", *lines[3:]]))
    elif damage == "times":
        file.write_text("".join([*lines[:2], re.sub(r'"ended":\[[\d.e-]+,', '"ended":[', lines[2]),
                                 *lines[3:]]))
    elif damage == "empty":
        (folder / "rank-00000.jsonl").write_text("")
    else:
        file.write_bytes(b"\xff\xfe\x00\n")
    for verb in ("trace", "compare"):
        with pytest.raises(InputError, match=re.escape(words)):
            command(verb, copy)


@pytest.mark.parametrize(("damage", "words"), [
    ("none", "config.json: there is none"), ("torn", "config.json cannot be read"),
    ("key", "config.json:\n  - model.layerz: unknown key"),
    ("value", "model.heads=7"), ("other", "makes plan")])
def test_bad_config(damage, words, copy):
    """The plan is made again from the run's config, or the reason is said."""
    file = copy / "config.json"
    values = json.loads(file.read_text())
    if damage == "none":
        file.unlink()
    elif damage == "torn":
        file.write_text(file.read_text()[:100])
    else:
        section, key, value = {"key": ("model", "layerz", 3), "value": ("model", "heads", 7),
                               "other": ("model", "layers", 3)}[damage]
        values[section][key] = value
        file.write_text(json.dumps(values))
    with pytest.raises(InputError, match=re.escape(words)):
        command("compare", copy)


def test_exit_status(traced, tmp_path):
    """Status 2 and one line, no traceback."""
    for argv in (["compare", str(tmp_path)], ["trace", str(traced), "--step", "7"],
                 ["trace", str(traced), "-o", str(tmp_path / "no" / "where.json")],
                 ["trace", str(traced), "--svg", str(tmp_path / "no" / "where.svg")]):
        run = Run(tmp_path, *argv)
        assert run.wait() == 2, run.output
        assert run.output.startswith("threed: ") and len(run.output.splitlines()) == 1

"""tools/bubble_calc.py as its users run it: JSON, text, pictures, errors, cost, and that docs/pipeline.md shows what it
prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parallelism_figures import FIGURES
from megalite.commands.bubble import main
from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.send_recv_actions import with_communication
from megalite.planner.drawing import timeline
from megalite.planner.drawing.timeline import svg

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bubble_calc.py"
SMALL = ["--pp", "4", "--microbatches", "8"]
OTHERS = {*FIGURES, "fp8-training"}
PICTURES = sorted(path for path in (ROOT / "docs" / "pictures").glob("*.svg") if path.stem not in OTHERS)


@pytest.fixture
def tool(monkeypatch, capsys):
    """tool(*arguments) → what it prints."""
    monkeypatch.setattr("sys.argv", ["bubble_calc.py"])
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> str:
        main(list(map(str, arguments)))
        return capsys.readouterr().out

    return call


def test_json_has_every_measure_under_its_name(tool):
    content = json.loads(tool(*SMALL, "--schedule", "zb-h2", "--json"))
    assert content == {
        **{"schedule": "zb-h2", "pp": 4, "microbatches": 8, "virtual_stages": 1},
        **{"forward": 1, "input_backward": 1, "weight_backward": 1, "comm": 0},
        **{"makespan": 27, "ideal": 24, "longest_span": 24},
        **{"bubble_fraction": pytest.approx(1 / 9), "bubble_over_ideal": 0.125, "bubble_rate": 0},
        **{"peak_activations": [7, 5, 3, 1], "peak_with_weight_stash": [7, 7, 7, 7], "messages": [8, 16, 16, 8]},
    }


def test_durations_reach_the_order_and_the_clock(tool):
    """A backward of 0.5 + 0.25 on two ranks, one microbatch: two forwards, a message, two backwards, a message."""
    times = ["--forward", 2, "--input_backward", 0.5, "--weight_backward", 0.25, "--comm", 0.125]
    content = json.loads(tool("--pp", 2, "--microbatches", 1, "--schedule", "1f1b", *times, "--json"))
    assert content["makespan"] == 2 * 2 + 2 * 0.75 + 2 * 0.125 and content["ideal"] == 2.75
    cheap = json.loads(tool(*SMALL, "--schedule", "zb-h1", "--weight_backward", 0, "--json"))
    assert cheap["weight_backward"] == 0 and cheap["ideal"] == 16, "0 is a duration, not an option left out"


def test_text_has_measures_and_drawing(tool):
    text = tool(*SMALL, "--schedule", "1f1b")
    assert "bubble_over_ideal         37.5%  makespan / ideal - 1" in text and "rank 3  .........F0|B0---|F1|" in text
    assert "rank 0  F" not in tool("--pp", 16, "--microbatches", 256, "--schedule", "1f1b"), (
        "thousands of bars are not drawn unasked"
    )
    assert max(map(len, tool(*SMALL, "--schedule", "zb-v").splitlines())) <= 120


@pytest.mark.parametrize("name", SCHEDULES)
def test_printed_actions_are_those_that_run(name, tool):
    schedule = build(name, 4, 8)
    assert str(schedule) in tool(*SMALL, "--schedule", name, "--print")
    content = json.loads(tool(*SMALL, "--schedule", name, "--print", "messages", "--json"))
    assert content["actions"] == [list(map(repr, actions)) for actions in with_communication(schedule).actions]


def test_compare_and_sweep(tool):
    plans = json.loads(tool(*SMALL, "--compare", "--virtual_stages", 4, "--json"))["plans"]
    assert [(bubble_plan["schedule"], bubble_plan["virtual_stages"]) for bubble_plan in plans] == [
        (n, {"interleaved": 4, "zb-v": 2, "v-half": 2}.get(n, 1)) for n in SCHEDULES
    ]
    plans = json.loads(tool("--microbatches", 8, "--sweep", "pp=2,8", "--schedule", "gpipe", "--json"))["plans"]
    assert [(bubble_plan["pp"], bubble_plan["bubble_over_ideal"]) for bubble_plan in plans] == [(2, 1 / 8), (8, 7 / 8)]
    rows = tool("--microbatches", 8, "--sweep", "pp=2,8", "--schedule", "gpipe").splitlines()
    assert rows[0].startswith("gpipe: 8 microbatches") and [row.split()[0] for row in rows[2:]] == ["pp", "2", "8"]
    text = tool("--pp", 4, "--sweep", "microbatches=4,8", "--compare")
    for measure in (
        "bubble_fraction",
        "bubble_over_ideal",
        "bubble_rate",
        "peak_activations",
        "peak_with_weight_stash",
    ):
        assert f"\n{measure}\nmicrobatches  gpipe" in text


def test_a_run_beside_its_prediction(tool, tmp_path):
    (tmp_path / "traces").mkdir()
    durations = {"forward": [0.01] * 4, "input_backward": [0.02] * 4, "weight_backward": None}
    content = {
        "schedule": "1f1b",
        "pp": 4,
        "microbatches": 8,
        "virtual_stages": 1,
        "steps": [3, 4],
        "durations": durations,
        "comm": 0,
    }
    (tmp_path / "traces" / "timeline.json").write_text(json.dumps(content | {"measured": {"bubble_fraction": 0.3}}))
    text = tool("--from_run", tmp_path, "--compare")
    assert (
        "bubble_fraction     30.0%      27.3%" in text
        and "makespan" in text
        and "half of a backward" in text
        and "zb-v " in text
    )
    report = json.loads(tool("--from_run", tmp_path, "--json"))
    assert report["measured"] == {"bubble_fraction": 0.3, "steps": [3, 4]}
    assert report["predicted"]["makespan"] == pytest.approx(0.33) and report["predicted"]["forward"] == [0.01] * 4


def test_timelines_in_every_format(tool, tmp_path):
    starts = {"svg": b"<svg ", "html": b"<!doctype html>", "png": b"\x89PNG", "json": b'{"traceEvents"'}
    for ending, start in starts.items():
        tool(*SMALL, "--schedule", "zb-h1", "--timeline", tmp_path / f"a.{ending}")
        assert (tmp_path / f"a.{ending}").read_bytes().startswith(start)
    tool(*SMALL, "--compare", "--timeline", tmp_path / "all.svg")
    assert all(f">{name}: 4 ranks" in (tmp_path / "all.svg").read_text() for name in SCHEDULES)


def test_gathering_of_shared_weights_is_costed_and_drawn(tool, tmp_path):
    """One rank, one microbatch: F takes 1, B 2; its two buckets take 1 each, and the one at the turning point stays."""
    sizes = ("--pp", 1, "--microbatches", 1, "--schedule", "1f1b", "--gather", 2, "--buckets", 2)
    content = json.loads(tool(*sizes, "--json"))
    assert {name: content[name] for name in ("gather", "buckets", "reshard")} == {
        "gather": 2.0,
        "buckets": 2,
        "reshard": "action",
    }
    assert (content["makespan"], content["ideal"], content["stalled"]) == (4.5, 3.0, [1.5])
    assert (content["weights_gathered"], content["weights_whole"]) == ([1.5], [1.0])
    kept = json.loads(tool(*sizes, "--reshard", "step", "--json"))
    assert (kept["weights_gathered"], kept["makespan"]) == ([1.0], 4.5)
    assert "stalled" not in json.loads(tool(*SMALL, "--schedule", "1f1b", "--json"))
    assert ["weights_gathered", "1.5", "times", "in", "a", "step,"] in [
        line.split()[:6] for line in tool(*sizes).splitlines()
    ]
    printed = json.loads(tool(*sizes, "--print", "messages", "--json"))["actions"]
    assert printed == [["G0", "G1@1", "R0@1", "F0.0", "G0@2", "R1@2", "R0@1", "B0.0"]]
    two = ("--pp", 2, "--microbatches", 2, "--schedule", "1f1b", "--gather", 1, "--buckets", 2, "--print")
    moves = [
        [name for name in rank if name[0] in "GR" and name[1] not in "FB"]
        for rank in json.loads(tool(*two, "--json"))["actions"]
    ]
    with_messages = json.loads(tool(*two, "messages", "--json"))["actions"]
    assert [
        [name for name in rank if name[0] in "GR" and name[1] not in "FB"] for rank in with_messages
    ] == moves and moves[0]
    assert tool(*sizes, "--gather", 20).splitlines()[-1].count(".") >= 2, "waiting for weights is drawn as waiting"
    assert " gathered  stalled" in tool(*SMALL, "--compare", "--gather", 1)
    odd = json.loads(
        tool(*SMALL, "--schedule", "interleaved", "--virtual_stages", 3, "--gather", 1, "--buckets", 8, "--json")
    )
    assert odd["buckets"] == 8 and odd["weights_whole"] == [0.25] * 4
    tool(*sizes, "--timeline", tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events if event.get("cat") == "gather"] == [
        ("G0", 0.0, 1000.0),
        ("G1@1", 1000.0, 1000.0),
        ("G0@2", 2500.0, 1000.0),
    ]
    tool(*sizes, "--timeline", tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text().count(": gathers bucket") == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "--pp is required"),
        ("--pp 4", "--microbatches is required"),
        ("--pp 4 --microbatches 8", "--schedule is required, unless --compare or --from_run"),
        ("--pp 0 --microbatches 8 --compare", "--pp: '0' is not a positive integer"),
        ("--pp 4 --microbatches many --compare", "--microbatches: 'many' is not a positive integer"),
        ("--pp 4 --microbatches 8 --schedule zigzag", "choose from 'gpipe', '1f1b'"),
        (
            "--pp 4 --microbatches 8 --schedule zb-v --virtual_stages 3",
            "--virtual_stages=3: zb-v requires 2. Leave it unset",
        ),
        ("--pp 4 --microbatches 8 --schedule 1f1b --comm -1", "--comm: '-1' is not a number from 0 to 1e+100"),
        ("--pp 4 --microbatches 8 --schedule 1f1b --forward inf", "--forward: 'inf' is not a number from 0 to 1e+100"),
        (
            "--pp 4 --microbatches 8 --schedule 1f1b --forward 1e308",
            "--forward: '1e308' is not a number from 0 to 1e+100",
        ),
        ("--pp 4 --microbatches 8 --compare --forward 0 --input_backward 0 --weight_backward 0", "all 0"),
        ("--pp 4 --microbatches 8 --compare --schedule 1f1b", "--schedule and --compare are mutually exclusive"),
        ("--pp 4 --sweep tp=1,2 --compare", "'tp=1,2' must vary microbatches or pp"),
        ("--pp 4 --sweep microbatches=1,,2 --compare", "'' is not a positive integer"),
        (
            "--pp 4 --microbatches 8 --sweep microbatches=1,2 --compare",
            "--microbatches and --sweep microbatches are mutually exclusive",
        ),
        ("--pp 4 --sweep microbatches=1,2 --compare --timeline a.svg", "--timeline and --sweep are mutually exclusive"),
        ("--pp 4 --microbatches 8 --schedule 1f1b --timeline a.gif", "must end in .png or .svg or .html or .json"),
        ("--pp 4 --microbatches 8 --compare --timeline a.json", "must end in .png or .svg or .html, got a.json"),
        (
            "--pp 4 --microbatches 8 --schedule 1f1b --timeline missing/a.svg",
            "--timeline: missing/a.svg cannot be written: the directory missing does not exist",
        ),
        ("--pp 4 --microbatches 64 --schedule 1f1b --timeline a.svg", "--timeline a.svg: a picture has at most"),
        ("--from_run nowhere", "nowhere/traces/timeline.json: No such file"),
        ("--from_run nowhere --pp 4", "--pp and --from_run are mutually exclusive"),
        ("--pp 4 --microbatches 8 --schedule 1f1b --virtual 2", "unrecognized arguments: --virtual"),
        (
            "--pp 4 --microbatches 8 --schedule 1f1b --buckets 2",
            "--buckets requires --gather T",
        ),
        ("--pp 4 --microbatches 8 --schedule 1f1b --gather 1 --buckets 0", "--buckets: '0' is not a positive integer"),
        ("--from_run nowhere --gather 1", "--gather and --from_run are mutually exclusive"),
    ],
)
def test_bad_input_ends_with_one_message(arguments, message, tool, capsys, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_BARS", 300)
    with pytest.raises(SystemExit) as error:
        tool(*arguments.split())
    out, err = capsys.readouterr()
    assert error.value.code == 2 and out == ""
    assert message in err and err.count("\n") == 1 and err.startswith("bubble_calc.py: ")


@pytest.mark.parametrize(
    "arguments, makespan",
    [
        ("--pp 64 --microbatches 1024 --schedule interleaved --virtual_stages 4", 3 * 1024 + 3 * 63 / 4),
        ("--compare --pp 16 --microbatches 128", 3 * (128 + 15)),
    ],
)
def test_large_plans_need_no_torch(arguments, makespan):
    program = (
        f"import runpy, sys\ntry:\n    runpy.run_path({str(TOOL)!r}, run_name='__main__')\nfinally:\n    assert "
        "'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, *arguments.split(), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    content = json.loads(done.stdout)
    assert (content["plans"][0] if "plans" in content else content)["makespan"] == makespan


@pytest.mark.parametrize(
    "arguments", [["--schedule", "interleaved", "--virtual_stages", "4"], ["--compare"]], ids=["one", "all"]
)
def test_the_work_grows_with_the_plan_and_no_faster(arguments, tool):
    """Counted in function calls, Python's and C's, for twice as many microbatches; those for none are start-up."""

    def calls(microbatches: int) -> int:
        count = 0

        def tally(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tally)
        try:
            tool("--pp", 8, "--microbatches", microbatches, *arguments, "--json")
        finally:
            sys.setprofile(None)
        return count

    tool("--pp", 8, "--microbatches", 8, *arguments, "--json")  # imports
    small, large = calls(64), calls(128)
    assert small < large < 2.1 * small


def test_the_page_shows_every_schedule_as_the_tool_draws_it(tool, tmp_path):
    """`make pictures` draws them again."""
    page = (ROOT / "docs" / "pipeline.md").read_text()
    assert [path.stem for path in PICTURES] == sorted(SCHEDULES)
    for path in PICTURES:
        tool(*SMALL, "--schedule", path.stem, "--timeline", tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
        assert f"](pictures/{path.name})" in page
    completed = subprocess.run(["make", "-n", "pictures"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"for name in {' '.join(SCHEDULES)};" in completed and " ".join(SMALL) in completed


def test_the_manual_shows_the_figures_as_they_are_drawn():
    names = ("docs/mathematics.md", "docs/context-parallel.md", "docs/hybrids.md", "README.md")
    pages = "".join((ROOT / name).read_text() for name in names)
    for name, figure in FIGURES.items():
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == svg(figure()), (
            "`make pictures` draws it again"
        )
        assert f"pictures/{name}.svg)" in pages


def test_the_page_shows_the_table_as_the_tool_prints_it(tool):
    assert tool(*SMALL, "--compare").rstrip() in (ROOT / "docs" / "pipeline.md").read_text()

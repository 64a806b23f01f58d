"""megalite report: a page that needs nothing beside it, with the numbers of metrics.jsonl and config.yaml."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megalite.commands import report
from megalite.config.load import from_dict, to_dict
from megalite.monitoring import starts
from megalite.monitoring.report import charts, figures
from megalite.monitoring.report.run import read
from megalite.monitoring.starts import Start

VOID = {"meta", "br", "img", "link"}
LAYOUTS = ("tp 1 × pp 2 × dp 1, ZeRO-1, 1f1b", "tp 1 × pp 1 × dp 2, ZeRO-1")


class Balanced(HTMLParser):
    """Fails on a tag that closes another than the last one opened; keeps what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        links = (value for name, value in attrs if name in ("src", "href", "xlink:href") and value)
        self.loaded += [link for link in links if not link.startswith(("#", "data:"))]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def write_run(
    directory: Path, steps: int = 40, lr: float = 3e-4, experts: int | None = None, **parallel: object
) -> Path:
    directory.mkdir(parents=True)
    mixtures = {"num_experts": experts, "mlp_only_layers": [1]} if experts else {}
    config = from_dict(
        {
            "model": {"preset": "tiny", "vocab_size": 257, **mixtures},
            "parallel": {"dp": 1, **parallel},
            "optimizer": {"lr": lr},
            "train": {"steps": 50, "global_batch_size": 8, "micro_batch_size": 2},
        }
    )
    (directory / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    common = {
        "lr": lr,
        "tokens": 100,
        "tflops_per_gpu": 0.1,
        "mfu": None,
        "peak_memory_bytes": 2**30,
        "loss_scale": 1.0,
    }
    lines = [
        {
            "step": step,
            "loss": 5 - step / 20,
            "grad_norm": 1 / step,
            "step_time_s": 0.5 + step,
            "tokens_per_second": 1000.0 + step,
        }
        | ({"expert_load_peak": 2.0, "expert_load_peaks": [4 - step / 20, 2.0, 1 + step / 40]} if experts else {})
        | (fp8_values(step) if experts and step % 10 == 0 else {})
        | {
            "bubble_fraction": 0.25 + step / 1e4,
            "skipped": step == 3,
            "time_forward_s": 0.2,
            "time_backward_s": 0.3 + step,
            **common,
        }
        for step in range(1, steps + 1)
    ]
    lines.insert(20, {"step": 20, "val_loss": 4.125})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo')
    return directory


def fp8_values(step: int) -> dict[str, object]:
    """Values as of `logging.fp8_interval`. The first of four layers has no matmuls in fp8."""
    own: dict[str, object] = {"fp8_flushed/x": step / 1000, "fp8_error/forward": 0.03, "fp8_saturated/w": 0.0}
    for key, names in (("error", ("x", "w", "forward")), ("flushed", ("x", "w")), ("saturated", ("x", "w"))):
        for place, name in enumerate(names):
            for matrix in ("attention.qkv", "attention.out", "mlp.in", "mlp.down"):
                own[f"fp8_{key}_by_layer/{matrix}.{name}"] = [None, step / 1000, 0.025, place / 10]
    return own


def resumed(directory: Path, after: int = 30, **changes: object) -> Path:
    """A run of 40 steps that was begun on two stages of a pipeline and resumed on two replicas, each with predictions
    of its own."""
    write_run(directory, dp=2)
    second = yaml.safe_load((directory / "config.yaml").read_text())
    first = {**second, "parallel": {**second["parallel"], "pp": 2, "dp": 1}}
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()[:-1]]
    for line in (line for line in lines if "loss" in line and line["step"] > after):
        line |= {"bubble_fraction": None, "step_time_s": 2.0, "tokens_per_second": 5000.0}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    predicted = [{"step_time_s": 25.0, "bubble_fraction": 0.111}, {"step_time_s": 1.5, "bubble_fraction": None}]
    (directory / "prediction.json").write_text(json.dumps(predicted[1]))
    for step, options, prediction in ((0, first, predicted[0]), (after, second | changes, predicted[1])):
        starts.add(directory, Start(step, options, {"ranks": 2, "device": "CPU"}, prediction=prediction))
    return directory


def cells_of(page: str) -> dict[str, list[str]]:
    """First cell → the others, of the first row that begins with it."""
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th>((?:<td>[^<]*</td>)*)</tr>', page)
    return {name: re.findall("<td>([^<]*)</td>", rest) for name, rest in reversed(rows)}


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Title → what charts.js draws."""
    content = [json.loads(unescape(data)) for data in re.findall(r'data-chart="([^"]*)"', page)]
    return {chart["title"]: chart for chart in content}


def page_of(*arguments: object) -> str:
    report.main(list(map(str, arguments)))
    return Path(arguments[0], "report.html").read_text()


def test_the_page_is_whole_and_needs_nothing_beside_it(tmp_path: Path):
    page = page_of(write_run(tmp_path / "alone", pp=2))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and parser.loaded == []
    assert "url(http" not in page and "@import" not in page


def test_it_tells_what_the_run_wrote(tmp_path: Path):
    page = page_of(write_run(tmp_path / "alone", pp=2))
    cells = dict(re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td>', page))
    assert cells["Steps"] == "40 of 50" and cells["Tokens seen"] == "4,000" and cells["Steps skipped"] == "1"
    assert cells["Last loss"] == "3.0000" and cells["Best validation loss"] == "4.1250"
    assert cells["Step time, s"] == "31", "the median of the second half: steps 21 to 40"
    assert cells["Layout"] == "tp 1 × pp 2 × dp 1, ZeRO-1, 1f1b" and cells["MFU"] == "–"
    assert "1f1b: 2 ranks, 4 microbatches" in page, "the schedule that the configuration plans is drawn"
    assert "<td>20.0%</td><td>25.3%</td>" in page, "its bubble, (p − 1) / (m + p − 1), beside what was measured"
    for title in ("Loss", "Gradient norm", "Throughput", "Step phases: alone"):
        assert f"<h3>{title}</h3>" in page
    assert "<h3>Loss scale</h3>" not in page, "it never changed"


def test_the_load_of_experts_is_a_heat_map_with_a_row_for_each_mixture(tmp_path: Path):
    page = page_of(write_run(tmp_path / "alone", experts=8, dp=2, ep=2))
    assert "<td>tp 1 × pp 1 × dp 2, ep 2, ZeRO-1</td>" in page
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and parser.loaded == []
    chart = charts_of(page)["Maximum expert load, relative to the mean: alone"]
    assert chart["kind"] == "heat" and [line["name"] for line in chart["lines"]] == ["layer 0", "layer 2", "layer 3"], (
        "layer 1 is dense"
    )
    assert chart["lines"][0]["values"] == [pytest.approx(4 - step / 20) for step in range(1, 41)]
    assert "<h3>Bubble</h3>" not in page and cells_of(page)["Bubble"] == ["–"], "one stage has no bubble"
    flushed = charts_of(page)["Flushed to zero in fp8: alone"]["lines"]
    assert [(line["name"], line["values"]) for line in flushed] == [("x", [1.0, 2.0, 3.0, 4.0])]
    tables = re.findall(r'<table class="heat">.*?</table>', page, re.DOTALL)
    assert [re.findall("<caption>(.*?)[,(]", table)[0].split()[0] for table in tables] == [
        "Error",
        "Flushed",
        "Saturated",
    ]
    assert re.findall('<th scope="colgroup" colspan="(.*?)">(.*?)<', tables[0])[:2] == [
        ("3", "attention.qkv"),
        ("3", "attention.out"),
    ]
    assert re.findall('<th scope="col">(.*?)<', tables[0])[:4] == ["layer", "x", "w", "forward"]
    rows = [re.findall(r'<th scope="row">(\d)</th>(.*?)</tr>', table, re.DOTALL) for table in tables]
    assert [layer for layer, _ in rows[0]] == ["1", "2", "3"], "of the last measured step, without the layer in bf16"
    assert re.findall(r" (\d+)%, transparent\)\">(.*?)<", rows[0][0][1])[:3] == [("12", "4")] * 3, "60 % is the largest"
    assert re.findall(r" (\d+)%, transparent\)\">(.*?)<", rows[0][2][1])[:3] == [("0", "0"), ("30", "10"), ("60", "20")]


def test_it_shows_losses_that_have_names(tmp_path: Path):
    directory = write_run(tmp_path / "named")
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()[:-1]]
    lines = [
        line
        | (
            {"val_loss/<prose>": 4.5, "val_loss/code": 3.75, "val_rewards/accuracies": 0.5}
            if "val_loss" in line
            else {"loss/data/a": 2.5, "rewards/chosen": 0.5}
        )
        for line in lines
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(directory)
    cells = dict(re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td>', page))
    assert (cells["Last validation loss (&lt;prose&gt;)"], cells["Last validation loss (code)"]) == (
        "4.5000",
        "3.7500",
    )
    curves = charts_of(page)
    assert [line["name"] for line in curves["Validation loss of each dataset: named"]["lines"]] == ["<prose>", "code"]
    assert [line["name"] for line in curves["Training loss of each data source: named"]["lines"]] == ["data/a"]
    rewards = curves["Rewards of completions, and their accuracy: named"]["lines"]
    assert [line["name"] for line in rewards] == ["chosen"]
    held_out = curves["Validation: rewards of completions, and their accuracy: named"]["lines"]
    assert [(line["name"], line["values"]) for line in held_out] == [("accuracies", [0.5])]
    assert "<prose>" not in page
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []


def test_several_runs_are_compared(tmp_path: Path):
    runs = write_run(tmp_path / "slow"), write_run(tmp_path / "fast", lr=6e-4)
    report.main([*map(str, runs), "--output", str(tmp_path / "both.html")])
    page = (tmp_path / "both.html").read_text()
    differences = page.partition("Configuration differences")[2].partition("<h2>")[0]
    assert re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td>', differences) == [
        ("optimizer.lr", "0.0003", "0.0006")
    ]
    curves = charts_of(page)
    assert [curves[title]["over"] for title in ("Loss", "Loss over tokens", "Loss over time")] == [
        *("step", "million tokens", "minutes of training"),
    ]
    names = [line["name"] for line in curves["Loss"]["lines"]]
    assert names == ["slow", "slow, validation", "fast", "fast, validation"]


def test_only_a_run_with_a_pipeline_has_a_curve_of_bubbles(tmp_path: Path):
    curves = charts_of(page_of(write_run(tmp_path / "one", pp=1), write_run(tmp_path / "two", pp=2)))
    assert [line["name"] for line in curves["Bubble"]["lines"]] == ["two"]
    assert [line["name"] for line in curves["Throughput"]["lines"]] == ["one", "two"]


def test_long_runs_are_thinned_and_lose_no_extreme(tmp_path: Path):
    values = np.random.default_rng(0).normal(size=100_000)
    at, mean, low, high = charts.thinned(range(1, 100_001), values.tolist())
    assert len(at) == charts.POINTS and low.min() == values.min() and high.max() == values.max()
    assert (
        np.average(mean) == pytest.approx(values.mean(), rel=0.05, abs=1e-3)
        and (low <= mean).all()
        and (mean <= high).all()
    )
    step = np.where(np.arange(1, 100_001) > 77, 5.0, 1.0)
    at, mean, low, high = charts.thinned(range(1, 100_001), step.tolist(), [77.5])
    assert (low == high).all() and at[0] == 39 and mean[0] == 1.0, "no point has steps of two segments"


def test_predictions_are_beside_what_was_measured(tmp_path: Path):
    directory = write_run(tmp_path / "alone")
    (directory / "prediction.json").write_text(json.dumps({"step_time_s": 25.0, "gpu": "cpu"}))
    assert "<td>25</td><td>31</td>" in page_of(directory)


def test_a_run_that_was_resumed_with_another_layout_has_figures_of_each(tmp_path: Path):
    """Steps 1 to 30 took 0.5 s more than their number each, with a bubble; steps 31 to 40 2 s each, without one."""
    page = page_of(resumed(tmp_path / "run"))
    summary = cells_of(page.partition("<h2>")[0])
    assert summary["Layout"] == [" → ".join(LAYOUTS)] and summary["Ranks"] == ["2 × CPU"]
    assert summary["Step time, s"] == ["23.5 → 2"] and summary["Tokens/s"] == ["1,023 → 5,000"]
    assert summary["Bubble"] == ["25.2% → –"] and summary["Steps"] == ["40 of 50"]
    table = cells_of(page.partition("<h2>Segments</h2>")[2].partition("<h2>")[0])
    assert table["Steps"] == ["steps 1 to 30", "steps 31 to 40"] and table["Layout"] == list(LAYOUTS)
    assert table["Step time, s"] == ["23.5", "2"] and table["parallel.pp"] == ["2", "1"]
    predictions = page.partition("<h2>Predicted and measured</h2>")[2].partition("<h2>")[0]
    headings = re.findall(r'<th scope="col">(run[^<]*)</th>', predictions)
    assert headings == [
        f"run, segment 1 (steps 1 to 30: {LAYOUTS[0]})",
        f"run, segment 2 (steps 31 to 40: {LAYOUTS[1]})",
    ]
    assert re.findall("<td>([^<]*)</td>", predictions) == ["11.1%", "25.2%", "25", "23.5", "1.5", "2"]
    assert "1f1b: 2 ranks, 4 microbatches" in page, "the pipeline of the first segment"
    assert {title: chart["marks"] for title, chart in charts_of(page).items()} == {
        title: [[30.5, 2, None]] for title in charts_of(page)
    }


def test_what_a_resume_changes_is_in_the_plain_data(tmp_path: Path):
    result = figures.as_json(
        read(resumed(tmp_path / "run", train={"global_batch_size": 16, "micro_batch_size": 2, "precision": "bf16"}))
    )
    first, second = result["segments"]
    assert (first["first_step"], first["last_step"], first["layout"]["pp"], first["step_time_s"]) == (1, 30, 2, 23.5)
    assert (second["first_step"], second["last_step"], second["layout"]["dp"], second["step_time_s"]) == (
        31,
        40,
        2,
        2.0,
    )
    assert [(each["precision"], each["global_batch_size"]) for each in result["segments"]] == [
        ("fp32", 8),
        ("bf16", 16),
    ]
    assert [each["predicted"] for each in result["segments"]] == [
        {"bubble_fraction": 0.111, "step_time_s": 25.0},
        {"step_time_s": 1.5},
    ]
    assert result["step_time_s"] == 2.0 and result["tokens_per_second"] == 5000.0, "those of the present layout"


@pytest.mark.parametrize(
    "begun, expected",
    [
        ([(0, {}), (20, {})], [(1, 40)]),
        ([(0, {}), (10, {"train.steps": 60, "run.name": "other"}), (20, {"checkpoint.keep": 2})], [(1, 40)]),
        (
            [(0, {}), (10, {"parallel.dp": 2}), (10, {"parallel.tp": 2}), (20, {"optimizer.lr": 1.0})],
            [(1, 10), (11, 20), (21, 40)],
        ),
        ([(0, {}), (30, {"parallel.dp": 2}), (10, {"parallel.tp": 2})], [(1, 10), (11, 40)]),
        ([(15, {})], [(1, 15), (16, 40)]),
        ([(0, {}), (40, {"parallel.dp": 2})], [(1, 40), (41, None)]),
        ([], [(1, 40)]),
    ],
    ids=[
        "the same again",
        "another horizon",
        "a start without a step",
        "steps done again",
        "the first unknown",
        "just begun",
        "none",
    ],
)
def test_segments_are_steps_in_a_row_with_the_same_layout_and_options(begun, expected, tmp_path: Path):
    run = write_run(tmp_path / "run")
    for step, changes in begun:
        options = yaml.safe_load((run / "config.yaml").read_text())
        for name, value in changes.items():
            section, _, option = name.partition(".")
            options[section][option] = value
        starts.add(run, Start(step, options))
    result = read(run).segments
    assert [(each.first, each.last) for each in result] == expected
    assert result[0].layout == ("–" if begun == [(15, {})] else "tp 1 × pp 1 × dp 1, ZeRO-1")


@pytest.mark.parametrize("changed", [{"device": "H100"}, {"ranks": 4}, {"torch": "3"}])
def test_other_hardware_or_software_begins_a_segment(changed: dict[str, object], tmp_path: Path):
    run = write_run(tmp_path / "run")
    options, environment = (
        yaml.safe_load((run / "config.yaml").read_text()),
        {"ranks": 1, "device": "A100", "torch": "2"},
    )
    starts.add(run, Start(0, options, environment))
    starts.add(run, Start(10, options, environment | changed))
    (run / "starts.jsonl").write_text((run / "starts.jsonl").read_text() + '{"step": 20, "opt')  # a kill
    assert [each.first for each in read(run).segments] == [1, 11]


@pytest.mark.parametrize("broken", ["nothing", "config", "metrics"])
def test_what_is_no_run_is_one_message(broken: str, tmp_path: Path, capsys):
    directory = tmp_path / "run"
    if broken != "nothing":
        write_run(directory)
        file = directory / {"config": "config.yaml", "metrics": "metrics.jsonl"}[broken]
        file.write_text({"config": "model: {hidden: 3}\n", "metrics": '{"loss": 3.0}\n'}[broken])
    with pytest.raises(SystemExit) as ended:
        report.main([str(directory)])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.count("\n") == 1 and str(directory) in message


def test_a_chart_has_its_values_as_a_table_too(tmp_path: Path):
    page = page_of(write_run(tmp_path / "run"))
    section = page.partition("<h3>Loss</h3>")[2].partition("</section>")[0]
    cells = cells_of(section)
    assert cells["1"] == ["4.95", "–"] and cells["40"] == ["3", "–"] and len(cells) == 12


@pytest.mark.parametrize("state, left", [("running", ["5 min 10 s"]), ("done", None)])
def test_a_run_that_runs_has_its_time_left(state: str, left: list[str] | None, tmp_path: Path):
    """10 steps of 50 are left, and the last 20 took 31 s in the median."""
    directory = write_run(tmp_path / "run")
    (directory / "summary.json").write_text(json.dumps({"state": state}))
    assert cells_of(page_of(directory)).get("Time left") == left


def test_a_run_that_has_not_stepped_yet_has_a_page(tmp_path: Path):
    directory = write_run(tmp_path / "new")
    (directory / "metrics.jsonl").unlink()
    assert "0 of 50" in page_of(directory) and read(directory).steps == []


def test_a_run_that_validates_on_its_training_data_says_so(tmp_path: Path):
    directory = write_run(tmp_path / "same")
    assert "Validated on training data" not in page_of(directory)
    options = yaml.safe_load((directory / "config.yaml").read_text())
    options["data"] |= {"train": ["data/a", "data/b"], "validation": {"prose": "data/../data/b", "code": "data/c"}}
    (directory / "config.yaml").write_text(yaml.safe_dump(options))
    page = page_of(directory)
    assert (
        "Validated on training data" in page
        and "prose: data/../data/b" in page
        and "code: data/c" not in page.split("Step time")[0]
    )

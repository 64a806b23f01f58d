"""The measured timeline: what it says of known times, and that a run's own is whole, ordered and consistent with its
metrics."""

from __future__ import annotations

import contextlib
import gc
import io
import json
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, write_config
from megalite.mesh.mesh import Layout
from megalite.monitoring import starts
from megalite.monitoring.report.run import read
from megalite.monitoring.timeline import Record, compare, describe, read_record, timeline, written
from megalite.monitoring.timeline_recorder import TimelineRecorder, write
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.schedule import Action, ActionKind
from megalite.system.clock import ActionMarks, ActionTiming, DeviceClock, Transfer
from megalite.training.fit import fit
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import mesh_of
from tests.support.pool import RankContext
from tests.support.spaces.layouts import Case

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
MODEL: Case = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 8, "masked": False, "dropout": 0.0}


def by_hand(start: float, hosts: tuple[str, str] = ("a", "a"), shift: float = 0.0, step: int = 3) -> list[Record]:
    """One microbatch of 1f1b on two ranks: forward takes 2 and 1, backward 3 and 4, a message 1; the second rank's
    clock is ahead."""
    first = [ActionTiming(Action(F, 0, 0), 0, 0, 2), ActionTiming(Action(B, 0, 0), 2, 9, 12)]
    second = [ActionTiming(Action(F, 1, 0), -1, 3, 4), ActionTiming(Action(B, 1, 0), 4, 4, 8)]
    at = [
        [ActionTiming(action, *(start + ahead + time for time in times)) for action, *times in ran]
        for ran, ahead in ((first, 0), (second, shift))
    ]
    clocks = [[90.0, 91.0, 95.0], [90.0 + shift, 91.0 + shift + 0.5, 95.0 + shift]]  # once a rank left the barrier late
    return [Record(host, clock, {step: ran}) for host, clock, ran in zip(hosts, clocks, at, strict=True)]


@pytest.mark.parametrize("hosts, shift", [(("a", "a"), 0.0), (("a", "b"), 1000.0), (("a", "b"), -50.0)])
def test_known_times(hosts: tuple[str, str], shift: float) -> None:
    report = timeline(build("1f1b", 2, 1), Layout(pp=2), by_hand(100.0, hosts, shift))
    assert {key: report[key] for key in ("schedule", "pp", "microbatches", "virtual_stages", "steps")} == {
        **{"schedule": "1f1b", "pp": 2, "microbatches": 1, "virtual_stages": 1, "steps": [3]}
    }
    assert report["durations"] == {"forward": [2, 1], "input_backward": [3, 4], "weight_backward": None}
    assert report["comm"] == 1
    # 10 seconds of work in 12 on two ranks
    idle = pytest.approx({"bubble_fraction": 1 - 10 / 24, "bubble_rate": 1 - 5 / 12})
    assert report["measured"] == idle and report["predicted"] == idle


def test_clocks_of_one_host_are_taken_as_they_are() -> None:
    records = by_hand(100.0, ("a", "a"))
    records[1].clock = [reading + 7 for reading in records[1].clock]  # late out of every barrier
    assert timeline(build("1f1b", 2, 1), Layout(pp=2), records)["comm"] == 1


def test_the_trace_shows_actions_waits_and_the_prediction() -> None:
    events = timeline(build("1f1b", 2, 1), Layout(pp=2), by_hand(100.0))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "measured", 1: "predicted"}
    assert {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }
    slices: defaultdict[Any, list[Any]] = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        slices[event["pid"], event["tid"]].append((event["name"], event["ts"] / 1e6, event["dur"] / 1e6))
    # the second rank began to wait a second before the first one computed: there the trace begins
    assert slices[0, 0] == [("F0.0", 1, 2), ("wait", 3, 7), ("B0.0", 10, 3)]
    assert slices[0, 1] == [("wait", 0, 4), ("F1.0", 4, 1), ("B1.0", 5, 4)]
    assert slices[1, 0] == [("F0.0", 1, 2), ("B0.0", 10, 3)] and slices[1, 1] == [("F1.0", 4, 1), ("B1.0", 5, 4)]


def test_what_travels_over_data_parallelism_is_beside_the_actions() -> None:
    """Two transfers that overlap, from 1 to 5, and one from 6 to 8; a rank waits for 1 + 0 + 1 seconds of them."""
    records = by_hand(100.0)
    records[0].transfers[3] = [
        Transfer("gather 0", 101.0, 103.0, 104.0),
        Transfer("reduce 1", 103.0, 105.0, 105.0),
        Transfer("reduce 0", 106.0, 107.0, 108.0),
    ]
    report = timeline(build("1f1b", 2, 1), Layout(pp=2), records)
    assert report["data_parallel"] == {"transfers": 1.5, "under_way": 3.0, "waited": 1.0}  # means over both ranks
    assert "1.5 transfers, 3000.00 ms with a transfer in flight, 1000.00 ms of waiting" in describe(report)[-1]
    under_way: dict[str, list[float]] = {}
    for event in report["traceEvents"]:  # the trace begins a second before the first action
        if event["ph"] in "be":
            under_way.setdefault(event["name"], []).append(event["ts"] / 1e6)
    assert under_way == {"pp 0: gather 0": [2, 5], "pp 0: reduce 1": [4, 6], "pp 0: reduce 0": [7, 9]}
    waits = [
        (event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
        for event in report["traceEvents"]
        if event["name"].startswith("wait: ")
    ]
    assert waits == [("wait: gather 0", 4, 1), ("wait: reduce 1", 6, 0), ("wait: reduce 0", 8, 1)]


def test_medians_and_means_are_over_steps_and_pipelines() -> None:
    """Two pipelines and two steps; in one step of one pipeline everything takes ten times as long."""
    records = []
    for rank in range(4):  # pp is the outermost axis: the pipelines are ranks 0 and 2, 1 and 3
        mine = by_hand(0.0)[rank // 2]
        slow = [
            ActionTiming(action, *(100 + (10 if rank % 2 else 1) * time for time in times))
            for action, *times in mine.steps[3]
        ]
        records.append(Record("a", [], {3: mine.steps[3], 4: slow}))
    report = timeline(build("1f1b", 2, 1), Layout(pp=2, dp=2), records)
    assert report["steps"] == [3, 4]
    assert report["durations"]["forward"] == [2, 1] and report["comm"] == 1
    assert report["measured"]["bubble_fraction"] == pytest.approx(1 - 10 / 24)
    names = [event["args"]["name"] for event in report["traceEvents"] if event["name"] == "process_name"]
    assert names == ["measured dp 0", "measured dp 1", "predicted"]
    lines = "\n".join(describe(report))
    assert "steps 3 to 4" in lines and "58.3% measured, 58.3% predicted" in lines and "1000.00–2000.00 ms" in lines


def test_events_of_a_device_become_host_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's events know milliseconds between each other alone; the one recorded when reading ties them to the host's
    clock."""
    device = iter([5.0, 7.0, 10.0, 40.0])  # milliseconds at which the stream passes one event after the other

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = next(device)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, action = DeviceClock(), Action(F, 0, 0)
    before = perf_counter()
    (times,) = clock.read([ActionMarks(action, clock.mark(), clock.mark(), clock.mark())])
    ran = ActionTiming(*times)
    assert (ran.start - ran.free, ran.end - ran.start) == pytest.approx((0.002, 0.003))
    assert before <= ran.end + 0.030 <= perf_counter()


def resumed(directory: Path, options: dict[str, Any], now: dict[str, Any]) -> Path:
    """A run that recorded step 3, and was resumed with other options after step 5."""
    for step, each in ((0, options), (5, now)):
        starts.add(directory, starts.Start(step, each))
    write_config(from_dict(now), directory)
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 9))
    )
    write(by_hand(100.0), directory / "traces" / "records.json")
    return directory


def test_records_are_compared_with_the_layout_that_they_are_of(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    train = {"global_batch_size": 1, "micro_batch_size": 1}
    model = {"preset": "tiny", "vocab_size": 64}
    before = {"model": model, "train": train, "parallel": {"pp": 2, "dp": 1, "schedule_costs": [1.0, 1.0, 1.0, 0.5]}}
    run = resumed(tmp_path, before, {"model": model, "train": train, "parallel": {"pp": 1, "dp": 1}})
    assert describe(compare(run))[0].startswith("1f1b, steps 3 to 3: bubble_fraction 58.3% measured, 58.3% predicted")
    content = json.loads((run / "traces" / "timeline.json").read_text())
    assert content["layout"] == {"tp": 1, "pp": 2, "dp": 1, "cp": 1} and content["schedule_costs"] == [
        1.0,
        1.0,
        1.0,
        0.5,
    ]
    assert [read(run).recorded_in(segment) is not None for segment in read(run).segments] == [True, False]
    starts.add(run, starts.Start(2, before | {"parallel": {"pp": 3, "dp": 1}}))  # step 3 is done again on three ranks
    with pytest.raises(ConfigError, match="records of 2 ranks, and its steps were done again on 3"):
        compare(run)


# ---- real runs


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def fit_quietly(context: RankContext, config: dict[str, Any]) -> str:
    """Run the training loop; what it prints on this rank."""
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            fit(trainer, [TimelineRecorder(trainer)])
    finally:
        trainer.close()
        gc.unfreeze()
        gc.enable()
    return printed.getvalue()


def compared(config: dict[str, Any], directory: Path) -> tuple[str, dict[str, Any]]:
    """What a run that is over says of its records, and its traces/timeline.json."""
    write_config(from_dict(config), directory / "run")
    lines = [*describe(compare(directory / "run")), written(directory / "run")]
    return "\n".join(lines), json.loads((directory / "run" / "traces" / "timeline.json").read_text())


def configure(prefix: str, directory: Path, profiling: dict[str, Any], steps: int = 4, **case: Any) -> dict[str, Any]:
    changes = {"run": {"dir": str(directory), "name": "run"}, "profiling": profiling, "checkpoint": {"load": "auto"}}
    config = config_of({**MODEL, **case}, prefix, **changes)
    config["train"]["steps"] = steps
    return config


CASES: list[Case] = [
    {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "1f1b"},
    {"pp": 2, "tp": 2, "microbatches": 4, "schedule": "zb-v"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["schedule"])
def test_a_run_writes_every_action_of_every_rank(case: Case, prefix: str, ranks: Any, tmp_path: Path) -> None:
    config = configure(prefix, tmp_path, {"timeline": True, "steps": [2, 3]}, **case)
    printed = ranks.run(4, fit_quietly, config)
    said, row = compared(config, tmp_path)
    schedule = build(case["schedule"], 2, 4)
    assert row["steps"] == [2, 3] and row["virtual_stages"] == schedule.stages // 2
    assert all(len(values) == schedule.stages for name, values in row["durations"].items() if values)
    assert (row["durations"]["weight_backward"] is None) == (ActionKind.WEIGHT not in schedule.passes)
    assert min(value for values in row["durations"].values() if values for value in values) > 0

    slices: defaultdict[Any, list[Any]] = defaultdict(list)
    for event in row["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "wait" and event["pid"] < 2:
            slices[event["pid"], event["args"]["step"], event["tid"]].append(event)
    assert len(slices) == 2 * 2 * 2  # pipelines, steps, ranks
    for (pid, step, rank), events in slices.items():
        assert [event["name"] for event in events] == [repr(action) for action in schedule.compute(rank)]
        ends = {event["name"]: event["ts"] + event["dur"] for rank in range(2) for event in slices[pid, step, rank]}
        for before, after in zip(events, events[1:], strict=False):
            assert after["ts"] >= before["ts"] + before["dur"]
        for event in events:  # nothing starts before what it needs, wherever that ran
            kind, stage, microbatch = event["name"][0], event["args"]["stage"], event["args"]["microbatch"]
            needed = {
                "F": f"F{stage - 1}.{microbatch}",
                "B": f"B{stage + 1}.{microbatch}",
                "W": f"B{stage}.{microbatch}",
            }[kind]
            assert event["ts"] >= ends.get(needed, 0.0)

    assert 0 <= row["predicted"]["bubble_fraction"] < 1 and 0 < row["measured"]["bubble_fraction"] < 1
    assert f"bubble_fraction {row['measured']['bubble_fraction']:.1%} measured" in said and "timeline.json" in said
    assert "steps 2 to 3 are recorded" in printed[0] and not any(printed[1:])
    bubbles = [
        json.loads(line)["bubble_fraction"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(bubbles) == 4 and all(0 <= bubble < 1 for bubble in bubbles)
    records = [read_record(record) for record in json.loads((tmp_path / "run" / "traces" / "records.json").read_text())]
    for step in (2, 3):
        recorded = [record.steps[step] for record in records]
        busy = sum(one.end - one.start for ran in recorded for one in ran)
        walls = [ran[-1].end - ran[0].start for ran in recorded if any(one.action.stage == 0 for one in ran)]
        assert bubbles[step - 1] == pytest.approx(max(1 - busy / (2 * sum(walls)), 0))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_reductions_and_gathers_are_seen_to_overlap_with_computing(
    zero: int, prefix: str, ranks: Any, tmp_path: Path
) -> None:
    """Two microbatches on one stage, two ranks, a bucket for each unit: 8 layers, the embedding, the head."""
    config = configure(prefix, tmp_path, {"timeline": True, "steps": [2, 3]}, dp=2, microbatches=2, zero=zero)
    config["parallel"]["bucket_mb"] = 1e-6
    ranks.run(2, fit_quietly, config)
    events = compared(config, tmp_path)[1]["traceEvents"]
    # step 3 of the first rank
    starts = {event["id"]: event for event in events if event["ph"] == "b" and event["id"].startswith("3.0.")}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    computed = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["pid"] == 0 and event.get("args", {}).get("step") == 3
    }
    names = [event["name"].removeprefix("pp 0: ") for event in starts.values()]
    reductions = sorted(name for name in names if name.startswith("reduce"))
    assert reductions == sorted([f"reduce {bucket}" for bucket in range(10)] * (2 if zero >= 2 else 1))
    gathers = {0: 0, 1: 10, 2: 10, 3: 2 * (2 * 10 - 2)}  # of weights: none, each once, each use, see test_zero.py
    assert len(names) - len(reductions) == gathers[zero]
    start, end = computed["B0.1"]
    during = [event for key, event in starts.items() if "reduce" in event["name"] and start < event["ts"] < ends[key]]
    assert sum(event["ts"] < end for event in during) >= 9, "reductions begin while the last backward still computes"
    if zero == 3:
        start, end = computed["F0.1"]
        inside = [
            key
            for key, event in starts.items()
            if "gather" in event["name"] and start < event["ts"] and ends[key] < end
        ]
        assert len(inside) == 9, "each layer's weights, and the head's, come while the layer before computes"


def test_a_run_that_ends_early_writes_what_it_has_and_one_that_begins_late_says_so(
    prefix: str, ranks: Any, tmp_path: Path
) -> None:
    profiling = {"timeline": True, "steps": [2, 9]}
    early = configure(prefix, tmp_path, profiling, pp=2, microbatches=2, schedule="1f1b")
    ranks.run(2, fit_quietly, early)
    assert compared(early, tmp_path)[1]["steps"] == [2, 3, 4]
    path = tmp_path / "run" / "traces" / "records.json"
    path.unlink()
    late = configure(prefix, tmp_path, {**profiling, "steps": [1, 4]}, steps=5, pp=2, microbatches=2, schedule="1f1b")
    late["checkpoint"]["allow"] = ["horizon"]
    printed = ranks.run(2, fit_quietly, late)[0]
    assert (
        "resumed after step 4" in printed
        and "no timeline: the run has done none of profiling.steps = [1, 4]" in printed
    )
    assert not path.exists()


def one_step(context: RankContext, config: dict[str, Any]) -> tuple[float | None, list[tuple[float, float]]]:
    """A step's bubble_fraction, and when this rank's actions started and ended."""
    run_config = from_dict(config)
    trainer = Trainer(run_config, mesh_of(context, run_config))
    try:
        return trainer.step().bubble_fraction, [(start, end) for _, _, start, end in trainer.parts.runtime.ran]
    finally:
        trainer.close()


def test_bubble_fraction_is_measured_and_the_same_on_every_rank(prefix: str, ranks: Any, tmp_path: Path) -> None:
    config = configure(prefix, tmp_path, {}, pp=2, dp=2, microbatches=4, schedule="1f1b")
    results = ranks.run(4, one_step, config)
    busy = sum(end - start for _, ran in results for start, end in ran)
    available = sum(
        2 * (ran[-1][1] - ran[0][0]) for _, ran in results[:2]
    )  # ranks 0 and 1 hold the first stage, of two
    assert len({bubble for bubble, _ in results}) == 1 and results[0][0] == pytest.approx(1 - busy / available)
    assert not (tmp_path / "run" / "traces").exists()


def test_one_process_waits_for_nobody(prefix: str, ranks: Any, tmp_path: Path) -> None:
    config = configure(prefix, tmp_path, {"timeline": True, "steps": [2, 2]}, microbatches=2)
    ranks.run(1, fit_quietly, config)
    _, row = compared(config, tmp_path)
    assert row["pp"] == 1 and row["comm"] == 0 and row["predicted"] == {"bubble_fraction": 0, "bubble_rate": 0}
    names = [event["name"] for event in row["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    assert names == ["F0.0", "B0.0", "F0.1", "B0.1"]

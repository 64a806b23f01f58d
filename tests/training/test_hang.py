"""What `megalite explain` makes of the records of ranks that hang: docs/faults.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.commands import explain as command
from megalite.mesh.layout import AXES, PRODUCTS, Layout
from megalite.parallel.pipeline.generator import build
from megalite.parallel.pipeline.send_recv_actions import with_communication
from megalite.system.activity import BETWEEN, READING, REDUCING
from megalite.training.hang import Explanation, explain, load

STEP, RUNS = 7, 6


class Run:
    """A run's directory in which ranks leave records."""

    def __init__(self, directory: Path, microbatches: int = 4, **sizes: int):
        self.directory, self.layout = directory, Layout(**sizes)
        self.microbatches = microbatches
        (directory / "stalls").mkdir()

    def plan(self, rank: int, schedule: str = "1f1b") -> list[str]:
        schedule_plan = with_communication(build(schedule, self.layout.pp, self.microbatches))
        return [str(action) for action in schedule_plan.actions[rank // (self.layout.world // self.layout.pp)]]

    def leave(self, rank: int, action: str, waits: str | None = None, peer: int | None = None, **changed: Any) -> None:
        plan = changed.get("plan", self.plan(rank))
        number = plan.index(action) if action in plan else None
        runs = RUNS + (action not in (BETWEEN, READING) and number is None)
        place: dict[str, Any] = {"step": STEP, "runs": runs, "action": action, "number": number, "actions": len(plan)}
        place["since"] = 100.0 + rank
        place |= {"waits": waits, "peer": peer} if waits else {}
        axes = {name: self.layout.peers(rank, (name,)) for name in ("pp", "dp", "tp")}
        axes |= {"world": self.layout.peers(rank, AXES), "data": self.layout.peers(rank, PRODUCTS["data"])}
        record = {
            "rank": rank,
            "host": f"node{rank}",
            "time": 200.0,
            "start": "b",
            "plan": plan,
            "axes": axes,
            "seen": {},
        }
        record |= {
            "place": place | changed.pop("place", {}),
            "traffic": {"all_reduce data": 10, "isend pp": 5},
            "frames": [],
        } | changed
        (self.directory / "stalls" / f"rank_{rank:05d}.json").write_text(json.dumps(record))

    def explained(self) -> Explanation:
        return explain(load(self.directory))


@pytest.fixture
def pipeline(tmp_path: Path) -> Run:
    """Two stages of two replicas: ranks 0 and 1 feed 2 and 3."""
    return Run(tmp_path, pp=2, dp=2)


def test_a_rank_that_stays_in_a_computation(pipeline: Run) -> None:
    pipeline.leave(0, "B0.0", "pipeline message RB0.0<1", 2)
    pipeline.leave(1, "reduction", "all_reduce over data", 0, traffic={"all_reduce data": 11})
    pipeline.leave(2, "B1.0", frames=["runtime.py:1 in run", "attention.py:70 in forward", "sleep.py:3 in wait"])
    pipeline.leave(3, "reduction", "all_reduce over data", 2, traffic={"all_reduce data": 11})
    explanation = pipeline.explained()
    assert (explanation.culprit, explanation.unmatched) == (2, "RB0.0<1")
    assert (
        "B1.0, action 4 of 16" in explanation.instead
        and "sleep.py:3 in wait < attention.py:70 in forward" in explanation.instead
    )
    assert [line.partition(" (")[0] for line in explanation.chain] == ["rank 1", "rank 0", "rank 3"]
    assert (
        "it should execute SB1.0>0" in explanation.chain[1]
        and "it has started 10, rank 3 has started 11" in explanation.chain[2]
    )


def test_a_rank_that_waits_for_its_data(pipeline: Run) -> None:
    """Rank 1 has not begun the step; its neighbour in the pipeline waits for it, and that one's replica for that
    one."""
    pipeline.leave(0, "reduction", "all_reduce over data", 1, traffic={"all_reduce data": 11})
    pipeline.leave(1, READING, frames=["loader.py:120 in step"])
    pipeline.leave(2, "reduction", "all_reduce over data", 3, traffic={"all_reduce data": 11})
    pipeline.leave(3, "F1.0", "pipeline message RF1.0<0", 1)
    explanation = pipeline.explained()
    assert (explanation.culprit, explanation.unmatched) == (1, "RF1.0<0")
    assert explanation.instead == "it was in step 7, reading its batch (loader.py:120 in step)"
    assert {wait.rank: wait.on for wait in explanation.waits} == {0: 1, 2: 3, 3: 1}


def test_a_rank_that_stays_in_a_save(pipeline: Run) -> None:
    pipeline.leave(0, "saving", frames=["writer.py:50 in write"])
    for rank in (1, 2, 3):
        pipeline.leave(rank, "saving", "broadcast over world")
    explanation = pipeline.explained()
    assert (explanation.culprit, explanation.unmatched) == (0, "broadcast over world")
    assert explanation.instead == "it was in step 7, saving (writer.py:50 in write)" and len(explanation.chain) == 3


def test_a_rank_that_saves_is_before_one_that_validates(pipeline: Run) -> None:
    """A run that has to stop saves first, and with asynchronous saves no rank waits there for another one."""
    pipeline.leave(0, "saving", frames=["saver.py:50 in copy"])
    pipeline.leave(2, "F1.0", "pipeline message RF1.0<0", 0, place={"runs": RUNS + 1})
    explanation = pipeline.explained()
    assert [(wait.rank, wait.on, wait.skipped) for wait in explanation.waits] == [(2, 0, False)]
    assert explanation.instead == "it was in step 7, saving (saver.py:50 in copy)"


def test_a_rank_without_a_record(pipeline: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 2, 3):
        pipeline.leave(rank, "reduction", "all_reduce over world", traffic={"all_reduce world": 11})
    assert command.main([str(pipeline.directory)]) == 0
    assert "rank 1 (host unknown) caused the hang: it left no record" in capsys.readouterr().out


@pytest.mark.parametrize("schedule, microbatches", [("gpipe", 3), ("1f1b", 3)])
def test_ranks_with_different_plans(pipeline: Run, schedule: str, microbatches: int) -> None:
    pipeline.microbatches = microbatches
    shorter = pipeline.plan(2, schedule)
    pipeline.microbatches = 4
    pipeline.leave(0, "B0.3", "pipeline message RB0.3<1", 2)
    pipeline.leave(2, shorter[-1], "pipeline message SB1.2>0", 0, plan=shorter)
    explanation = pipeline.explained()
    assert explanation.culprit == 2 and explanation.unmatched == "SF0.3>1"
    assert (
        "its plan does not contain RF1.3<0" in explanation.instead
        and "the ranks have different plans" in explanation.instead
    )


def test_a_rank_that_skipped_a_collective(tmp_path: Path) -> None:
    """Rank 1 has gone on without one all-reduce: both wait in their 41st, at different places."""
    run = Run(tmp_path, tp=2)
    run.leave(0, "F0.1", "all_reduce over tp", 1, traffic={"all_reduce tp": 41})
    run.leave(1, "B0.1", "all_reduce over tp", 0, traffic={"all_reduce tp": 41})
    explanation = run.explained()
    assert (explanation.culprit, explanation.unmatched) == (1, "all_reduce over tp, collective 41 there")
    assert (
        explanation.instead.startswith("it skipped this operation: it was in step 7, B0.1")
        and len(explanation.chain) == 1
    )


def test_a_rank_that_skipped_a_collective_and_waits_for_another_message(pipeline: Run) -> None:
    """Rank 3 is in its next step, where it waits for a message that rank 1 cannot send: the waits are a cycle."""
    pipeline.leave(0, REDUCING, "all_reduce over data", 1, traffic={"all_reduce data": 11})
    pipeline.leave(1, REDUCING, "all_reduce over world", 3, traffic={"all_reduce data": 11, "all_reduce world": 7})
    pipeline.leave(2, REDUCING, "all_reduce over data", 3, traffic={"all_reduce data": 11})
    pipeline.leave(
        3,
        "F1.0",
        "pipeline message RF1.0<0",
        1,
        place={"step": STEP + 1, "runs": RUNS + 1},
        traffic={"all_reduce world": 6},
    )
    explanation = pipeline.explained()
    assert (
        explanation.culprit == 3
        and "all_reduce over" in str(explanation.unmatched)
        and explanation.instead.startswith("it skipped this operation: ")
    )


@pytest.mark.parametrize(
    "state", ["its process has ended", "its process exists but does not respond; it may be stopped"]
)
def test_a_rank_that_left_no_record(pipeline: Run, state: str) -> None:
    """The others have asked it; the record of an earlier start counts no more."""
    place = {"step": STEP, "runs": RUNS, "action": "F1.2", "number": None, "actions": 0}
    pipeline.leave(
        0, "B0.0", "pipeline message RB0.0<1", 2, seen={2: {"state": state, "host": "node2", "place": place}}
    )
    pipeline.leave(2, "F1.1", start="a", time=50.0)
    pipeline.leave(1, "reduction", "all_reduce over data", 0, traffic={"all_reduce data": 11})
    explanation = pipeline.explained()
    assert (explanation.culprit, explanation.unmatched) == (2, "RB0.0<1")
    assert explanation.instead == f"{state}; last known in step 7, F1.2"


def test_a_rank_that_others_have_seen_later_than_it_wrote(pipeline: Run) -> None:
    """Its record is of a stall in an earlier step, after which it went on and was killed."""
    place = {"step": STEP, "runs": RUNS, "action": "F1.2", "number": 5, "actions": 16}
    pipeline.leave(
        2, READING, place={"step": 3, "runs": 2}, traffic={"all_reduce data": 2}, frames=["loader.py:1 in step"]
    )
    ended = {"state": "its process has ended", "host": "node2", "place": place}
    pipeline.leave(0, "B0.0", "pipeline message RB0.0<1", 2, seen={2: ended})
    explanation = pipeline.explained()
    assert (
        explanation.culprit == 2
        and explanation.instead == f"its process has ended; last known in step {STEP}, F1.2, action 6 of 16"
    )


def test_a_record_that_is_none_is_left_out(pipeline: Run) -> None:
    pipeline.leave(0, "B0.0", "pipeline message RB0.0<1", 2)
    for rank, text in ((1, "[]"), (2, "{}"), (3, '{"rank": ')):
        (pipeline.directory / "stalls" / f"rank_{rank:05d}.json").write_text(text)
    assert list(load(pipeline.directory)) == [0]


def test_devices_that_wait(tmp_path: Path) -> None:
    """Where no host waits, the flight records tell: rank 1 has not started the third collective of the group."""
    run = Run(tmp_path, dp=2)
    for rank, last in ((0, 3), (1, 2)):
        run.leave(rank, "norm and update" if rank == 0 else BETWEEN)
        entries = [
            {
                "process_group": ["g", "data"],
                "collective_seq_id": each,
                "is_p2p": False,
                "retired": each < 3,
                "state": "started",
            }
            for each in range(1, last + 1)
        ]
        (tmp_path / "stalls" / f"collectives_{rank:05d}.json").write_text(json.dumps({"entries": entries}))
    explanation = run.explained()
    assert (explanation.culprit, explanation.unmatched) == (1, "collective 3 of process group g")
    assert explanation.instead == "it was in step 7, between steps"


def test_a_cycle_and_a_run_that_does_not_hang(tmp_path: Path) -> None:
    run = Run(tmp_path, dp=2)
    run.leave(0, REDUCING)
    run.leave(1, REDUCING)
    assert run.explained() == Explanation(None, None, "", [], [])
    run.leave(0, REDUCING, "gradient norm", 1)
    run.leave(1, REDUCING, "gradient norm", 0)
    assert run.explained().culprit is None and len(run.explained().chain) == 2


def test_the_command(pipeline: Run, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline.leave(0, "B0.0", "pipeline message RB0.0<1", 2)
    pipeline.leave(2, "B1.0")
    assert command.main([str(pipeline.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "first unmatched action: RB0.0<1" and lines[2].startswith(
        "rank 0 (step 7, B0.0, action 6 of 16) waits for rank 2: "
    )
    assert lines[3].startswith("rank 2 (host node2) caused the hang: it was in step 7, B1.0")
    assert command.main([str(pipeline.directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["culprit"] == 2
    with pytest.raises(SystemExit, match="2"):
        command.main([str(pipeline.directory / "stalls")])
    assert "no records found in " in capsys.readouterr().err

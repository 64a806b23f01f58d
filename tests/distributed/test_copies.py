"""Copies in memory: whatever is lost, a run that restarts from them has the state of before, bit for bit."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megalite import checkpoint
from megalite.checkpoint.copies import DIRECTORY, PLACE_VARIABLE, directory_of
from megalite.config.load import from_dict
from megalite.launch.exit_status import ExitStatus
from megalite.planner.api import copying_bytes
from tests.support import jobs_copies
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.layouts import Case

MODEL: Case = {**SINGLE, "tied": True, "kv_heads": 2, "vocab_size": 96, "layers": 4, "masked": True, "dropout": 0.1}
BATCH, STEPS, EVERY, KILLED = 12, 6, 2, 6
DISK = 3  # interval of checkpoints
LAYOUTS: dict[str, Case] = {
    "dp2-zero3": {"dp": 2, "zero": 3},
    "dp2-zero2": {"dp": 2, "zero": 2},
    "pp2-dp2-zero1": {"pp": 2, "dp": 2, "zero": 1},
    "pp2-dp2-zb-v": {"pp": 2, "dp": 2, "zero": 1, "schedule": "zb-v"},
    "tp2-dp2-zero2": {"tp": 2, "dp": 2, "zero": 2},
    "dp3-zero1": {"dp": 3, "zero": 1},
    "one process": {},
}


class Loss(NamedTuple):
    """A run, what is lost of it, and the run that goes on.

    Attributes:
        nodes, then: the node of each rank, before and after.
        lost: nodes whose memory is lost.
        resumed: the step at which the run goes on.
        says: a part of what it says.
    """

    layout: str
    nodes: str
    lost: str
    other: str
    then: str
    resumed: int = 4
    says: str = "continuing from the copy in memory of step_00000004"


LOSSES = {
    "a rank, on one node": Loss("dp2-zero3", "aa", "", "dp2-zero3", "aa"),
    "a node, replaced by an empty one": Loss("dp2-zero2", "ab", "b", "dp2-zero2", "ac"),
    "the node of rank 0": Loss("pp2-dp2-zero1", "aabb", "a", "dp2-zero3", "bb"),
    "a node of four": Loss("tp2-dp2-zero2", "abcd", "c", "dp3-zero1", "abd"),
    "nodes in another order": Loss("pp2-dp2-zb-v", "aabb", "", "pp2-dp2-zb-v", "bbaa"),
    "neighbors": Loss(
        *("tp2-dp2-zero2", "abcd", "bc", "dp2-zero3", "ad"),
        resumed=3,
        says="the copy in memory of step_00000004 is not used: rank_00001.bin is on none of the 2 nodes",
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def configuration(layout: str, prefix: str, directory: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    case = {**MODEL, **LAYOUTS[layout]}
    config = config_of(case, prefix, run={"dir": str(directory), "name": "run"})
    config["train"] |= {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 2, "ema_decay": 0.9}
    config["checkpoint"] |= {"load": "auto", "interval": DISK, "copy_interval": EVERY}
    return {section: {**config.get(section, {}), **changes.get(section, {})} for section in {**config, **changes}}


def ranks_of(layout: str) -> int:
    return prod(LAYOUTS[layout].get(axis, 1) for axis in ("tp", "pp", "dp"))


def nodes(directory: Path, names: str) -> list[Path]:
    return [directory / name for name in names]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", LOSSES)
def test_a_restart_has_the_state_of_the_copy_bit_for_bit(name, ranks, prefix, tmp_path):
    """Copies after steps 2 and 4, a checkpoint after step 3, the end before step 6."""
    case, copies = LOSSES[name], tmp_path / "memory"
    before = ranks.run(
        *(ranks_of(case.layout), jobs_copies.fitted, configuration(case.layout, prefix, tmp_path)),
        *(nodes(copies, case.nodes), KILLED),
    )[0]
    for each in case.lost:
        shutil.rmtree(copies / each)
    config = configuration(case.other, prefix, tmp_path)
    after = ranks.run(ranks_of(case.other), jobs_copies.fitted, config, nodes(copies, case.then))
    for each in after:
        assert (each["origin"], each["resumed"]) == ("memory" if case.resumed == 4 else "checkpoint", case.resumed)
        assert case.says in each["notes"] and each["ended"] == STEPS
    assert {each["rollback"] for each in after} == {tmp_path / "run" / "checkpoints" / "step_00000003"}
    assert equal(after[0]["states"][case.resumed], before["states"][case.resumed])
    if case.layout == case.other:
        assert equal(after[0]["states"][5], before["states"][5])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    left = [path for each in set(case.nodes + case.then) for path in (copies / each).glob("*")]
    assert not [path for path in left if path.parent.name in case.then], "a run that is done needs no copies"


def test_a_torn_copy_is_not_used_and_the_one_before_is(ranks, prefix, tmp_path):
    """In the background, where rank 1 is killed in the middle of its file of step 4."""
    copies = nodes(tmp_path / "memory", "aabb")
    config = configuration("pp2-dp2-zero1", prefix, tmp_path, checkpoint={"interval": None, "async_save": True})
    before = ranks.run(4, jobs_copies.fitted, config, copies, KILLED, (), 1, 4)[0]
    left = {path.name for path in copies[0].iterdir()}
    assert "step_00000002" in left and "step_00000004" not in left
    after = ranks.run(4, jobs_copies.fitted, config, copies)[0]
    assert (after["origin"], after["resumed"]) == ("memory", 2)
    assert equal(after["states"][5], before["states"][5])


def test_a_request_for_another_number_of_ranks_ends_with_a_copy(ranks, prefix, tmp_path):
    """One rank is asked. Nothing is written to the disk; in fp64 the run is the one that never changed."""
    copies, changes = tmp_path / "memory", {"train": {"precision": "fp64"}, "checkpoint": {"interval": None}}
    straight = configuration("one process", prefix, tmp_path / "straight", **changes)
    expected = ranks.run(1, jobs_copies.fitted, straight)[0]["states"]
    config = configuration("tp2-dp2-zero2", prefix, tmp_path, **changes)
    stopped = ranks.run(4, jobs_copies.fitted, config, nodes(copies, "aabb"), None, (None, None, 3, None))
    assert {(each["ended"], each["status"]) for each in stopped} == {(3, ExitStatus.STOPPED)}
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is None
    config = configuration("dp3-zero1", prefix, tmp_path, **changes)
    after = ranks.run(3, jobs_copies.fitted, config, nodes(copies, "abb"))[0]
    assert (after["origin"], after["resumed"]) == ("memory", 3)
    for name, value in after["states"][STEPS].items():
        assert (value - expected[STEPS][name]).abs().max() <= 1e-9, name


def test_only_a_restart_with_the_same_options_reads_copies(ranks, prefix, tmp_path, monkeypatch):
    config, user = configuration("dp2-zero2", prefix, tmp_path), tmp_path / "memory"
    monkeypatch.delenv(DIRECTORY, raising=False)
    monkeypatch.setenv(PLACE_VARIABLE, str(user))
    place = directory_of(tmp_path / "run")
    assert place.parent == user, "runs for which a user names the same place do not share copies"
    ranks.run(2, jobs_copies.fitted, config, user, 4)
    assert {path.name for path in place.iterdir()} == {"step_00000002"}
    data = sum(chunk.bytes for chunk in checkpoint.manifest_of(place / "step_00000002").chunks())
    assert copying_bytes(from_dict(config)) == 2 * data, "per rank: two copies of its half, two of a neighbor's"
    newer = ranks.run(2, jobs_copies.fitted, config, user, KILLED)[0]
    assert (newer["origin"], newer["resumed"]) == ("checkpoint", 3)
    assert "the copy in memory of step_00000002 is not used: " in newer["notes"] and "is newer" in newer["notes"]
    assert {path.name for path in place.iterdir()} == {"step_00000004"}
    other = configuration("dp2-zero2", prefix, tmp_path, optimizer={"lr": 1e-3})
    changed = ranks.run(2, jobs_copies.fitted, other, user, KILLED)[0]
    assert (changed["origin"], changed["resumed"]) == ("checkpoint", 3)
    assert "the copy in memory of step_00000004 is not used: it was made with other options" in changed["notes"]
    first = ranks.run(2, jobs_copies.fitted, config, user, 4, (), None, None, False)[0]
    assert (first["origin"], first["notes"].count("copy in memory")) == ("checkpoint", 0)
    assert list(place.iterdir()) == []


def test_a_copy_is_newer_than_the_checkpoint_that_it_follows(ranks, prefix, tmp_path):
    """Whatever the numbers of steps."""
    config = configuration("one process", prefix, tmp_path, checkpoint={"async_save": True})
    checkpoints, memory = tmp_path / "run" / "checkpoints", nodes(tmp_path / "memory", "a")

    def fitted(config: dict[str, Any], killed: int | None = None, *options: bool) -> dict[str, Any]:
        return ranks.run(1, jobs_copies.fitted, config, memory, killed, (), None, None, *options)[0]

    fitted(config, 5, True, True)
    after = fitted(config)
    assert (after["origin"], after["resumed"]) == ("memory", 4), "of step 3, published after it"
    assert after["rollback"] == checkpoints / "step_00000003"
    (tmp_path / "run" / "starts.jsonl").write_text('{"step": 0, "started": "then"}\n')
    earlier = configuration("one process", prefix, tmp_path, checkpoint={"load": str(checkpoints / "step_00000003")})
    fitted(earlier, 5, False)
    again = fitted(earlier, 5)
    assert (again["origin"], again["resumed"]) == ("memory", 4), "beside step 6, which the run has left"
    assert again["rollback"] == checkpoints / "step_00000003"
    (tmp_path / "run" / "starts.jsonl").write_text('{"step": 0, "started": "now"}\n')
    other = fitted(earlier)
    assert other["origin"] == "checkpoint"
    assert f"the copy in memory of step_00000004 is not used: it is of another run in {tmp_path}" in other["notes"]


def test_a_run_that_goes_back_keeps_no_copy_of_what_it_leaves(ranks, prefix, tmp_path):
    """Copies after steps 2 and 4; steps 5 and 6 are bad, and 6 is not copied; the run goes back to the checkpoint of
    step 3."""
    faults = {"inject": "nan:step=5-6", "skip_limit": 2, "rollback": True}
    config = configuration("one process", prefix, tmp_path, faults=faults, train={"steps": 7})
    seen = ranks.run(1, jobs_copies.left_by_a_rollback, config, nodes(tmp_path / "memory", "a"))
    assert seen == [[(["step_00000002", "step_00000004"], [])]]


def test_too_little_memory_is_one_message_before_the_first_step(ranks, prefix, tmp_path):
    config = configuration("dp2-zero2", prefix, tmp_path)
    for message, _ in ranks.run(2, jobs_copies.without_room, config, nodes(tmp_path / "memory", "ab")):
        assert message.startswith("checkpoint.copy_interval = 2: 2 copies of the state of this node's ranks, and of")
        assert "has room for 1 kB" in message and "continuing" not in message
    ranks.run(2, jobs_copies.fitted, config, nodes(tmp_path / "memory", "ab"), KILLED)
    for message, origin in ranks.run(2, jobs_copies.without_room, config, nodes(tmp_path / "memory", "ab")):
        assert message.endswith("continuing without copies in memory"), "a job that goes on does not end there"
        assert origin == "memory", "what it goes on from stays"
    assert [path.name for path in (tmp_path / "memory" / "b").iterdir()] == ["step_00000004"]

"""Places for ranks that are lost and return."""

from __future__ import annotations

import os
import subprocess

import pytest

from megalite.launch import machine, slots
from megalite.launch.slots import Slots, devices_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def even(usable: int) -> int:
    return usable - usable % 2


def test_a_lost_place_returns_after_its_time_which_doubles():
    clock = Clock()
    places = Slots(4, even, 10.0, clock=clock)
    assert places.start() == 4 and places.in_use == [0, 1, 2, 3]
    places.lose([1])
    assert places.start() == 2 and places.in_use == [0, 2] and places.usable == [0, 2, 3]
    places.lose([1])  # local rank 1 is on place 2
    assert places.start() == 2 and places.in_use == [0, 3]
    clock.now += 9.0
    assert not places.grown() and places.usable == [0, 3]
    clock.now += 1.0
    assert places.grown() and places.start() == 4
    places.lose([1])
    places.start()
    clock.now += 10.0
    assert not places.grown(), "place 1 is lost for the second time"
    clock.now += 10.0
    assert places.grown()


def test_a_place_that_more_ranks_can_not_use_stops_nobody():
    clock = Clock()
    places = Slots(5, even, 1.0, clock=clock)
    places.start()
    places.lose([0])
    assert places.start() == 4
    clock.now += 1.0
    assert not places.grown() and places.usable == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("computes", [True, False])
def test_a_gpu_returns_once_it_computes(computes, monkeypatch):
    """A process tries the GPU: here one that only ends with its status."""
    monkeypatch.setattr(
        slots, "_COMPUTES", f"import os; assert os.environ['CUDA_VISIBLE_DEVICES'] == 'b'; exit({1 - computes})"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b,c")
    clock, devices = Clock(), ["a", "b", "c"]
    places = Slots(3, lambda usable: usable, 5.0, devices, clock)
    places.start()
    places.lose([1])
    places.start()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "a,c"
    clock.now += 5.0
    assert not places.grown(), "the process has only been started"
    probe = places._slots[1].probe
    assert isinstance(probe, subprocess.Popen) and probe.wait(60) == 1 - computes
    assert places.grown() == computes
    places.start()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("a,b,c" if computes else "a,c")
    clock.now += 4.0
    assert not places.grown() and places._slots[1].probe is None, "it is not tried again before its time"
    places.close()


@pytest.mark.parametrize(
    "visible, gpus, count, expected",
    [
        (None, 8, 4, ["0", "1", "2", "3"]),
        ("4,5, 6", 3, 3, ["4", "5", "6"]),
        ("", 0, 4, []),
        ("7", 1, 4, []),
        (None, 0, 4, []),
    ],
)
def test_places_are_gpus_if_each_rank_has_one(visible, gpus, count, expected, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GpuInfo("H100")] * gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices_of(count) == expected

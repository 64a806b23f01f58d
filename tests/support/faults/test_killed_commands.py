"""Eight of the kills of `python -m tests.support.faults.killed_commands`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.faults.killed_commands import IN_THE_SUITE, Scene, kill


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
def test_kills_leave_no_process_and_lose_nothing_and_the_next_start_goes_on(tmp_path):
    scene = Scene(tmp_path, random.Random(0))
    for what, whom, when in IN_THE_SUITE:
        # `python -m tests.support.faults.killed_commands` measures; here a loaded machine may take longer
        kill(scene, what, whom, when, within=60.0)

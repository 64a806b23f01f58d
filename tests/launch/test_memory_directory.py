"""The directory in memory that a launcher keeps for its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from megalite.checkpoint.copies import DIRECTORY, PLACE_VARIABLE
from megalite.launch.memory_directory import memory_directory

KILLED = """
import os, sys
from pathlib import Path
from megalite.launch.memory_directory import memory_directory
with memory_directory(Path(sys.argv[1])) as variables:
    Path(*variables.values(), "state").write_text("state")
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_launcher_leaves_is_removed_by_the_next_one(tmp_path):
    (tmp_path / "megalite-of-another").mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ)
    assert killed.returncode == -signal.SIGKILL and len(list(tmp_path.glob("*/state"))) == 1
    with memory_directory(tmp_path) as first:
        Path(first[DIRECTORY], "step_00000001").mkdir()
        assert list(tmp_path.glob("*/state")) == []
        with memory_directory(tmp_path) as second:  # of another launcher
            assert first[DIRECTORY] != second[DIRECTORY] and Path(first[DIRECTORY], "step_00000001").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["megalite-of-another"]


def test_a_user_names_the_place(tmp_path, monkeypatch):
    monkeypatch.setenv(PLACE_VARIABLE, str(tmp_path / "place"))
    with memory_directory() as variables:
        assert Path(variables[DIRECTORY]).parent == tmp_path / "place"


def test_without_such_memory_the_ranks_choose(tmp_path):
    with memory_directory(tmp_path / "none") as variables:
        assert variables == {}

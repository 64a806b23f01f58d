"""Recordings tell what changed, and only that: not how many ranks wrote a checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.recorded.comparing import differences
from tests.recorded.measuring import STATE, tensors_of

WHOLE = np.arange(24, dtype=np.float32).reshape(4, 6)
RUN = {
    "steps": [{"step": step, "loss": 1 / step} for step in range(1, 7)],
    "state": {"step": 6},
    "tensors": {"weight/a": "x", "exp_avg/a": "y"},
}
OLD: dict[str, Any] = {"only": None, "data": {}, "runs": {"one": RUN, "two": copy.deepcopy(RUN)}}


def write(directory: Path, parts: list[tuple[slice, slice]]) -> Path:
    directory.mkdir()
    chunks = []
    for rank, (rows, columns) in enumerate(parts):
        part = np.ascontiguousarray(WHOLE[rows, columns])
        (directory / f"rank_{rank:05}.bin").write_bytes(bytes(128) + part.tobytes())
        place = {"offsets": [rows.start, columns.start], "sizes": list(part.shape)}
        chunks.append({**place, "file": f"rank_{rank:05}.bin", "offset": 128, "bytes": part.nbytes, "crc32c": ""})
    tensor = {"dtype": "float32", "shape": list(WHOLE.shape), "chunks": chunks}
    (directory / "manifest.json").write_text(
        json.dumps({"format": 1, "state": dict.fromkeys(STATE, 0), "tensors": {"weight/a": tensor}})
    )
    return directory


def test_tensors_are_the_same_whatever_ranks_wrote_them(tmp_path: Path):
    one = tensors_of(write(tmp_path / "one", [(slice(0, 4), slice(0, 6))]))
    parts = [(slice(0, 1), slice(0, 6)), (slice(1, 4), slice(0, 2)), (slice(1, 4), slice(2, 6))]
    assert tensors_of(write(tmp_path / "three", parts)) == one
    with pytest.raises(AssertionError, match="weight/a has 24 elements, of which 18 are stored"):
        tensors_of(write(tmp_path / "two", parts[1:]))


def test_equal_recordings_have_no_differences():
    rest = {**RUN, "steps": RUN["steps"][3:]}
    assert differences(OLD, {**copy.deepcopy(OLD), "resumed": {"two": rest}}) == []
    assert differences(OLD, {"only": ["two"], "data": {}, "runs": {"two": RUN}}) == []


def test_the_first_difference_of_each_run_is_named():
    new = {**copy.deepcopy(OLD), "data": {"text.bin": "z"}, "resumed": {"two": {**RUN, "steps": RUN["steps"][4:]}}}
    new["runs"]["one"]["steps"][2]["loss"] += 1e-16
    new["runs"]["one"]["tensors"]["weight/a"] = "z"
    new["runs"]["two"]["tensors"]["weight/b"] = "z"
    lines = differences(OLD, new)
    assert [line.split(":")[0] for line in lines] == ["the token files differ", "one", "two", "two, resumed"]
    assert "'step': 3" in lines[1] and lines[2] == "two: weight/b: expected None, found z" and "'step': 4" in lines[3]
    del new["runs"]["one"]
    assert "one: is not in the new recording" in differences(OLD, new)

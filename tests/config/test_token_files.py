"""Validation data that is training data is named, under whatever path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megalite.config.load import from_dict
from megalite.config.token_files import remarks

SAME = {
    # data.train, data.validation → what the line names; None: no line
    "the same": ("a", "a", "a"),
    "another": ("a", "b", None),
    "another spelling": ("a", "./d/../a", "./d/../a"),
    "an absolute path": ("a", "{here}/a", "{here}/a"),
    "a link to the file": ("a", "link", "link"),
    "a link to the directory": ("d/c", "dir/c", "dir/c"),
    "a hard link": ("a", "hard", "hard"),
    "a copy": ("a", "d/copy", "d/copy"),
    "one of a list": (["a", "b"], ["c", "b"], "b"),
    "one of a blend": ({"a": 0.5, "b": 0.5}, {"b": 1.0, "a": 2.0}, "b, a"),
    "one of several sets": ({"a": 0.5, "b": 0.5}, {"prose": "c", "code": "./b"}, "code: ./b"),
    "two sets of other files": ("a", {"prose": "b", "code": "c"}, None),
    "a held-out fraction": ("a", 0.1, None),
    "no validation": ("a", None, None),
    "files that are not there": ("x/y", "x/../x/y", "x/../x/y"),
    "no training data": (None, "a", None),
}


@pytest.mark.parametrize("case", SAME)
def test_validation_data_that_is_training_data_is_named(case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    for name in ("a", "b", "c", "d/c"):
        Path(f"{name}.bin").write_text(name)
    shutil.copy("a.bin", "d/copy.bin")
    os.symlink("a.bin", "link.bin")
    os.symlink("d", "dir")
    os.link("a.bin", "hard.bin")
    train, validation, named = SAME[case]
    validation = validation.format(here=tmp_path) if isinstance(validation, str) else validation
    config = from_dict({"data": {"train": train, "validation": validation}, "validation": {"interval": 10}})
    line = None if named is None else named.format(here=tmp_path)
    expected = (
        []
        if line is None
        else [f"WARNING: data.validation has training data ({line}): its validation loss is a training loss"]
    )
    assert remarks(config) == expected

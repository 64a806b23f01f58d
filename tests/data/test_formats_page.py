"""docs/data.md: its examples are files that its commands prepare, and they cover every format and form that is read."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from megalite.commands.prepare import main
from megalite.config.token_files import metadata
from megalite.data.chat.records import FORMS
from megalite.data.preparation.sources import FORMATS
from tests.structure.sources import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text()
EXAMPLES = dict(re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = [
    shlex.split(line)
    for line in re.findall(r"^megalite (prepare .* --output .*)$", PAGE, re.MULTILINE)
    if "corpus/" not in line
]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_examples()


def write_examples() -> None:
    """Write the examples into the current directory; rows of a .parquet are JSON on the page."""
    from pyarrow import Table, parquet

    for name, content in EXAMPLES.items():
        if name.endswith(".parquet"):
            parquet.write_table(Table.from_pylist([json.loads(line) for line in content.splitlines()]), name)
        else:
            Path(name).write_text(content)


def prepared(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict:
    words = ["byte" if word == "models/llama" else word for word in words]
    monkeypatch.setattr(sys, "argv", [*words, "--json"])
    main()
    result: dict = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1])
def test_every_example_is_prepared_as_a_whole(words, monkeypatch, capsys):
    result = prepared(words, monkeypatch, capsys)
    named = [name for name in EXAMPLES if any(Path(name).match(word) for word in words)]
    rows = {"book.txt": 1, "corpus.csv": 2, "pairs.csv": 1, "alpaca.json": 1}
    expected = sum(rows.get(name, EXAMPLES[name].count("\n")) for name in named)
    expected *= 2 if metadata(result["prefix"]).get("preference") == "pairs" else 1
    assert (result["documents"], result["skipped"], result["without_loss"]) == (expected, 0, 0) and expected > 0


def test_the_examples_cover_what_is_read(monkeypatch, capsys):
    used = {name for words in COMMANDS for name in EXAMPLES if any(Path(name).match(word) for word in words)}
    assert used == set(EXAMPLES), "each example is prepared"
    assert {FORMATS[Path(name).suffix] for name in EXAMPLES} == set(FORMATS.values())
    forms = [form for words in COMMANDS if "--chat" in words for form in prepared(words, monkeypatch, capsys)["forms"]]
    assert set(forms) == {form for form in ("messages", "sharegpt", "alpaca", "prompt-completion") if form in FORMS}

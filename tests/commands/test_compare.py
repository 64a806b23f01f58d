"""`megalite compare`: figures and differing options beside each other; its page is that of `megalite report` with
several runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megalite.commands import compare, report
from tests.monitoring.test_report import write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [str(write_run(tmp_path / "slow")), str(write_run(tmp_path / "fast", steps=30, lr=6e-4))]


def columns(text: str) -> dict[str, list[str]]:
    """First cell of a line → the others."""
    lines = (re.split(r" {2,}", line) for line in text.splitlines() if line)
    return {first: rest for first, *rest in lines}


def test_the_table_has_the_final_figures_and_only_the_options_that_differ(runs, capsys):
    compare.main(runs)
    table = columns(capsys.readouterr().out)
    assert table[""] == ["slow", "fast"]
    assert table["Last loss"] == ["3.0000", "3.5000"] and table["Last validation loss"] == ["4.1250", "4.1250"]
    assert table["Tokens seen"] == ["4,000", "3,000"] and table["Training time"] == ["14 min", "8 min"]
    assert table["optimizer.lr"] == ["0.0003", "0.0006"]
    assert [name for name in table if "." in name] == ["optimizer.lr"]


def test_what_the_run_has_counted_and_a_validation_without_a_number_are_shown(tmp_path, capsys):
    """A rollback removes the lines of steps whose tokens were seen."""
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]]
    counted = [line | {"tokens_seen": 128 * (line["step"] + 4)} if "loss" in line else line for line in lines]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [*counted, {"step": 40, "val_loss": None}]))
    compare.main([str(run), str(write_run(tmp_path / "other"))])
    table = columns(capsys.readouterr().out)
    assert table["Tokens seen"] == ["5,632", "4,000"] and table["Last validation loss"] == ["–", "4.1250"]


def test_json_is_alone_on_stdout_and_has_the_same_figures(runs, capsys):
    compare.main([*runs, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert [(each["run"], each["step"], each["loss"], each["seconds"]) for each in content["runs"]] == [
        ("slow", 40, 3.0, 840),
        ("fast", 30, 3.5, 480),
    ]
    assert content["differences"] == {"optimizer.lr": [0.0003, 0.0006]} and content["report"] is None


def test_the_page_is_that_of_report(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "megalite.commands.report.page", lambda runs_shown: f"page of {[run.name for run in runs_shown]}"
    )
    for command in (compare, report):
        command.main([*runs, "--output", str(tmp_path / "page.html")])
        assert (
            tmp_path / "page.html"
        ).read_text() == "page of ['slow', 'fast']" and "page.html" in capsys.readouterr().out
        (tmp_path / "page.html").unlink()


def test_equal_configurations_are_said_to_be_equal_and_equal_names_become_paths(tmp_path, capsys):
    runs = [str(write_run(tmp_path / place / "run")) for place in ("a", "b")]
    compare.main(runs)
    said = capsys.readouterr().out
    assert "the configurations do not differ" in said and all(run in said or run[:47] in said for run in runs)


@pytest.mark.parametrize("arguments", [["one"], ["one", "two"]])
def test_what_can_not_be_compared_is_one_message(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1

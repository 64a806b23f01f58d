"""Bad records: by default the first one ends the preparation; with --skip_bad N up to N are skipped, counted and
listed."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.commands.prepare import main
from megalite.data.indexed import DataError, IndexedTokens
from megalite.data.preparation.chats import Chats
from megalite.data.preparation.prepare import prepare
from megalite.data.preparation.sources import open_inputs
from megalite.data.preparation.texts import Texts
from tests.data.chats import SHORT, write_lines

STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
STRICT += "{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
BROKEN = '{"text": '


OPTIONS = ["--tokenizer", "byte", "--output", "x", "--workers", "1", "--overwrite"]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Callable[..., tuple[int, str, str]]:
    """run(*arguments) → exit status, stdout, and stderr without the progress, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["prepare_data.py", *arguments, *OPTIONS])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(str(ended.code))
        out, err = capsys.readouterr()
        return status, out, "".join(line for line in err.splitlines(True) if not line.startswith("tokenizing: "))

    return call


def texts(prefix: str | Path = "x") -> list[bytes]:
    return bytes(token if token < 256 else 0 for token in IndexedTokens(prefix).tokens.tolist()).split(b"\0")[:-1]


def write_bad_texts() -> None:
    """Two good records, and three bad ones: lines 2, 4 and 6."""
    lines = ['{"text": "one"}', BROKEN, "", '{"body": "?"}', '{"text": "two"}', "[1]"]
    Path("a.jsonl").write_text("\n".join(lines))


def test_bad_lines_are_skipped_counted_and_listed(run, tmp_path):
    write_bad_texts()
    status, out, _ = run("--input", "a.jsonl", "--skip_bad", "3", "--json")
    result = json.loads(out)
    assert status == 0 and texts() == [b"one", b"two"] and result["skipped"] == 3
    assert [reason.split(" (")[0] for reason in result["skipped_first"]] == [
        "a.jsonl line 2 is not valid JSON",
        "a.jsonl line 4 has no key text",
        "a.jsonl line 6 is a list, not an object.",
    ]
    _, out, _ = run("--input", "a.jsonl", "--skip_bad", "9")
    assert (
        "3 bad records skipped, namely:\n  a.jsonl line 2 is not valid JSON (" in out
        and "\n  a.jsonl line 6 is a list" in out
    )


def test_more_than_that_end_it_with_one_message(run, tmp_path):
    write_bad_texts()
    status, out, err = run("--input", "a.jsonl", "--skip_bad", "2")
    assert (status, out) == (2, "")
    first, *listed = err.splitlines()
    assert first == "prepare_data.py: x: the input has more bad records than --skip_bad 2 allows."
    assert [line.split(" is ")[0].split(" has ")[0] for line in listed] == [
        f"  a.jsonl line {number}" for number in (2, 4, 6)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_by_default_the_first_one_ends_it(run, tmp_path):
    write_bad_texts()
    status, _, err = run("--input", "a.jsonl")
    assert (
        status == 2
        and "a.jsonl line 2 is not valid JSON" in err
        and "Pass --skip_bad N to skip up to N bad records." in err
    )
    assert "--skip_bad must be at least 0, got -1" in run("--input", "a.jsonl", "--skip_bad", "-1")[2]


def test_of_many_the_first_ten_are_listed(run, tmp_path):
    Path("a.jsonl").write_text('{"text": "one"}\n' + "no\n" * 25)
    _, out, _ = run("--input", "a.jsonl", "--skip_bad", "25")
    assert "25 bad records skipped, the first ones:" in out and out.count("is not valid JSON") == 10


def test_bad_conversations_are_skipped(run, tmp_path):
    """Those that are none, that are empty, and that the template refuses."""
    Path("strict.jinja").write_text(STRICT)
    bad = [
        {"text": "a"},
        {"messages": []},
        {"messages": [{"role": "system", "content": "no"}, *SHORT]},
        {"prompt": "", "completion": ""},
    ]
    bad += [
        {"messages": [{"role": "bing", "content": "a"}]},
        {"messages": [{**SHORT[1], "weight": "3"}]},
        {"instruction": "", "output": ""},
    ]
    write_lines(tmp_path / "a.jsonl", [bad[0], {"messages": SHORT}, *bad[1:]])
    command = ["--chat", "--input", "a.jsonl", "--chat_template", "strict.jinja", "--json", "--skip_bad"]
    status, out, _ = run(*command, "7")
    result = json.loads(out)
    assert (status, result["documents"], result["skipped"]) == (0, 1, 7)
    assert [reason.split(":")[0].split(" is not")[0] for reason in result["skipped_first"]] == [
        f"a.jsonl line {n}" for n in (1, 3, 4, 5, 6, 7, 8)
    ]
    assert (
        "a.jsonl line 4: the chat template (hash " in result["skipped_first"][2]
        and "no system" in result["skipped_first"][2]
    )
    status, _, err = run(*command, "6")
    assert status == 2 and "--skip_bad 6 allows.\n  a.jsonl line 1 is not a conversation" in err


def test_rows_of_csv_and_json_lists_are_skipped_by_number(run, tmp_path, monkeypatch, request):
    limit = csv.field_size_limit()
    request.addfinalizer(lambda: csv.field_size_limit(limit))
    monkeypatch.setattr("megalite.data.preparation.sources.LONGEST_FIELD", 20)
    Path("a.csv").write_text(f"text,id\none,1\ntwo\nthree,3\n{'four' * 9},4\nfive,5\n")
    status, out, _ = run("--input", "a.csv", "--skip_bad", "2", "--json")
    short, long = json.loads(out)["skipped_first"]
    assert texts() == [b"one", b"three", b"five"] and short == "a.csv row 2 has 1 fields, but the header has 2."
    assert long == "a.csv row 4 could not be parsed (field larger than field limit (20))."
    Path("b.json").write_text(json.dumps([{"prompt": "a", "completion": "b"}, 5]))
    Path("c.json").write_text("{}")
    status, out, _ = run("--chat", "--input", "b.json", "c.json", "--skip_bad", "2", "--json")
    assert status == 0
    assert json.loads(out)["skipped_first"] == [
        "b.json record 2 is a int, not an object.",
        "--input c.json is not a list of records.",
    ]


def test_damaged_files_of_a_glob_are_skipped(tmp_path):
    """A text file that cannot be read, a .jsonl that has gone, a parquet file that is none."""
    for name in ("a.txt", "b.txt", "c.jsonl", "d.parquet"):
        (tmp_path / name).write_text('{"text": "good"}')
    names = [f"{tmp_path}/*.txt", f"{tmp_path}/c.jsonl", f"{tmp_path}/d.parquet"]
    opening = {"exclude": [], "file_format": "auto", "text_key": "text", "split": "train"}
    with pytest.raises(DataError, match="d.parquet as parquet"):
        open_inputs(names, **opening)  # type: ignore[arg-type]
    sources = open_inputs(names, **opening, skip_bad=True)  # type: ignore[arg-type]
    for name in ("b.txt", "c.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(
        DataError, match="b.txt could not be read: No such file or directory. Pass --skip_bad N to skip"
    ):
        prepare(sources, tmp_path / "x", "byte")
    summary = prepare(sources, tmp_path / "x", "byte", Texts(skip_bad=3))
    assert summary.skipped == 3 and texts(tmp_path / "x") == [b'{"text": "good"}']
    names = ["b.txt", "c.jsonl", "d.parquet"]
    assert all(name in reason for name, reason in zip(names, summary.skipped_first, strict=True))


def test_nothing_but_bad_records_is_an_error_that_lists_them(tmp_path):
    (tmp_path / "a.jsonl").write_text("no\nneither\n")
    sources = open_inputs([f"{tmp_path}/a.jsonl"], exclude=[], file_format="auto", text_key=None, split="train")
    with pytest.raises(
        DataError,
        match=r"all records of the input are bad. Nothing was written."
        r"\n  .*a.jsonl line 1 is not valid JSON.*\n  .* line 2 is",
    ):
        prepare(sources, tmp_path / "x", "byte", Chats(skip_bad=5))


def test_the_line_of_a_bad_record_is_right_in_every_range_of_a_file(tmp_path, monkeypatch):
    """Ranges of 7 bytes: lines across several ranges, ranges without a line's beginning, and ranges that begin with a
    line."""
    monkeypatch.setattr("megalite.data.preparation.sources.TASK_BYTES", 7)
    lines = [
        "no",
        json.dumps({"text": "long " * 9}),
        "",
        "bad",
        json.dumps({"text": "b"}),
        "bad7",
        json.dumps({"text": "c"}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    sources = open_inputs([f"{tmp_path}/a.jsonl"], exclude=[], file_format="auto", text_key="text", split="train")
    summary = prepare(sources, tmp_path / "x", "byte", Texts(skip_bad=9))
    assert texts(tmp_path / "x") == [b"long " * 9, b"b", b"c"]
    assert [reason.split("line ")[1][0] for reason in summary.skipped_first] == ["1", "4", "6"]

"""What an input is, by its content: records of JSON under any name, compressed files, byte-order marks, null texts,
binary files."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from megalite.commands.prepare import main
from megalite.data.indexed import IndexedTokens

TEXTS = ["Fog lay on the river.", "grüße", "third,\nof two lines"]
RECORDS = [{"id": number, "body": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
CSV = 'id,body\n0,Fog lay on the river.\n1,grüße\n2,"third,\nof two lines"\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 9\n"

Run = Callable[..., tuple[int, dict, str]]


def _parquet() -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"body": TEXTS}), sink)
    return sink.getvalue().to_pybytes()


PARQUET = _parquet()


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Run:
    """run(*arguments) → exit status, the JSON result (empty after an error), and the lines for the user without the
    progress."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, dict, str]:
        words = ["prepare", *arguments, "--tokenizer", "byte", "--output", "x", "--overwrite", "--json"]
        monkeypatch.setattr(sys, "argv", words if "--workers" in words else [*words, "--workers", "1"])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(str(ended.code))
        out, err = capsys.readouterr()
        printed = [
            line for line in err.splitlines() if not line.startswith(("tokenizing: ", "reading for the tokenizer"))
        ]
        return status, json.loads(out or "{}"), "\n".join(printed)

    return call


def documents() -> list[str]:
    """Those of the token file of bytes, in which 256 is EOS."""
    file = IndexedTokens("x")
    ends = file.sizes.cumsum().tolist()
    return [
        bytes(file.tokens[end - size : end - 1].tolist()).decode()
        for size, end in zip(file.sizes.tolist(), ends, strict=True)
    ]


NAMED = {
    "JSON Lines called .json": ("a.json", LINES),
    "JSON Lines with a blank first line": ("a.json", "\n\n" + LINES),
    "a list": ("a.json", json.dumps(RECORDS)),
    "a list over several lines": ("a.json", json.dumps(RECORDS, indent=2)),
    "a list called .jsonl": ("a.jsonl", json.dumps(RECORDS, indent=1)),
    "JSON Lines called .txt": ("a.txt", LINES),
    "JSON Lines without a suffix": ("part-00000", LINES),
    "JSON Lines with an unknown suffix": ("a.dump", LINES),
    "a table called .csv": ("a.csv", CSV),
    "JSON Lines called .csv": ("a.csv", LINES),
    "JSON Lines called .parquet": ("a.parquet", LINES),
}


@pytest.mark.parametrize("case", NAMED)
def test_records_are_read_as_records(run, case):
    name, content = NAMED[case]
    Path(name).write_bytes(content.encode())
    assert run("--input", name, "--text_key", "body")[0] == 0
    assert documents() == TEXTS


def test_one_object_is_a_record_if_it_has_the_text_and_a_text_if_not(run):
    Path("one.json").write_text(json.dumps({"body": TEXTS[0], "id": 1}, indent=2))
    Path("line.json").write_text(json.dumps({"body": TEXTS[1]}))
    Path("package.json").write_text('{\n  "files": [\n    {"id": 1},\n    {"id": 2}\n  ]\n}\n')
    Path("tsconfig.json").write_text('{\n  // a comment\n  "strict": true\n}\n')
    status, _, printed = run("--input", "one.json", "line.json", "package.json", "tsconfig.json", "--text_key", "body")
    assert status == 0 and documents() == [
        *TEXTS[:2],
        Path("package.json").read_text(),
        Path("tsconfig.json").read_text(),
    ]
    assert (
        printed == "package.json and 1 more .json files have no records with --text_key body; "
        "reading the whole file as plain text"
    )
    status, _, printed = run("--input", "line.json", "one.json", "--format", "text")
    assert (status, printed) == (0, "") and documents()[0] == Path("line.json").read_text(), (
        "what is asked for is not told"
    )


STRINGS = {
    "a list": ("a.json", json.dumps(TEXTS)),
    "a list over several lines": ("a.json", json.dumps(TEXTS, indent=2)),
    "a list called .jsonl": ("a.jsonl", json.dumps(TEXTS)),
    "lines": ("a.jsonl", "".join(f"{json.dumps(text)}\n" for text in TEXTS)),
    "lines called .json": ("a.json", "".join(f"{json.dumps(text)}\n" for text in TEXTS)),
}


@pytest.mark.parametrize("case", STRINGS)
def test_strings_are_documents(run, case):
    name, content = STRINGS[case]
    Path(name).write_text(content)
    assert run("--input", name)[::2] == (0, "") and documents() == TEXTS
    assert (
        "a string, not an object with the key body. Remove --text_key" in run("--input", name, "--text_key", "body")[2]
    )


def test_other_lists_and_quoted_lines_are_text(run):
    files = {"a.json": '["error", {"max": 1}]', "b.json": "[]", "c.txt": '"Hello."\n"Who is it?"\n', "d.txt": '["a"]'}
    for name, content in files.items():
        Path(name).write_text(content)
    assert run("--input", *files)[0] == 0 and documents() == [*files.values()]


REFUSED = {
    "records without the text": (
        {"a.json": LINES},
        [],
        "a.json line 1 has no key text (--text_key). Available keys: id, body.",
    ),
    "a list without the text": (
        {"a.json": json.dumps(RECORDS)},
        [],
        "a.json record 1 has no key text (--text_key). Available keys: id, body.",
    ),
    "a damaged line of .json": ({"a.json": '{"text": \n{"text": "b"}\n'}, [], "a.json line 1 is not valid JSON"),
    "objects that are neither": (
        {"a.json": "".join(json.dumps({"text": text}, indent=1) + "\n" for text in TEXTS)},
        [],
        "a.json contains JSON objects that are neither one per line nor in a list.",
    ),
    "text_key of texts": (
        {"a.txt": "a"},
        ["--text_key", "body"],
        "--text_key body has no effect on plain text input",
    ),
    "text_key of forced texts": (
        {"a.jsonl": LINES},
        ["--text_key", "body", "--format", "text"],
        "--text_key body has no effect on plain text input",
    ),
    "text_key of conversations": (
        {"a.jsonl": LINES},
        ["--text_key", "body", "--chat"],
        "--text_key body is not supported with --chat. Use --keys",
    ),
    "split of files": ({"a.txt": "a"}, ["--split", "train"], "--split train requires an --input of the form hf:NAME"),
    "binary as text": (
        {"a.txt": b"\x7fELF\x02\x01\x01\0\0\0"},
        [],
        "a.txt contains NUL bytes and seems to be a binary file. Skip it with",
    ),
    "binary without a suffix": ({"tool": b"abc\0\1\2"}, [], "tool contains NUL bytes and seems to be a binary file"),
    "binary in a compressed file": (
        {"a.txt.gz": gzip.compress(b"\0\1")},
        [],
        "a.txt.gz contains NUL bytes and seems to be a binary file",
    ),
    "a PDF": ({"a.pdf": b"%PDF-1.7 ..."}, ["--format", "text"], "a.pdf is a PDF, not text"),
    "UTF-16": (
        {"a.txt": "wide".encode("utf-16")},
        [],
        "a.txt is encoded in UTF-16 or UTF-32, but UTF-8 is required. Convert it with `iconv",
    ),
    "a binary table": ({"a.csv": b"PK\x03\x04\0\0"}, [], "a.csv is a ZIP archive, not text"),
    "a compressed file that is cut": (
        {"a.txt.gz": gzip.compress(b"a" * 99)[:-9]},
        [],
        "a.txt.gz could not be read: Compressed file ended before",
    ),
    "compressed lines that are cut": (
        {"a.jsonl.zst": b"\x28\xb5\x2f\xfdgarbage"},
        [],
        "a.jsonl.zst is damaged and could only be read in part (ZSTD decompress failed",
    ),
    "a compressed table that is damaged": (
        {"a.csv.gz": gzip.compress(CSV.encode())[:-6]},
        [],
        "a.csv.gz could not be read: Compressed file ended",
    ),
    "a compressed list that is damaged": (
        {"a.json.gz": gzip.compress(json.dumps(RECORDS).encode())[:-6]},
        ["--chat"],
        "a.json.gz could not be read: Compressed",
    ),
    "a part of a parquet file": (
        {"a.parquet": PARQUET[:-1]},
        [],
        " It starts like a parquet file, so it is truncated or damaged. Copy it again.",
    ),
    "a table called .parquet": (
        {"a.parquet": gzip.compress(CSV.encode())},
        [],
        ". It is compressed with gzip. Decompress it",
    ),
    "a pointer called .parquet": (
        {"a.parquet": POINTER},
        [],
        " It is a Git LFS pointer, not the file itself. Run `git lfs pull`",
    ),
}
OTHERS = {
    "UTF-16": (
        json.dumps({"text": "wide"}).encode("utf-16"),
        "is encoded in UTF-16 or UTF-32, but UTF-8 is required. Convert it with `iconv -f UTF-16",
    ),
    "a part of a parquet file": (
        PARQUET[:-1],
        "is a parquet file, not text. Add --format parquet, or skip the file with --exclude.",
    ),
    "a ZIP archive": (
        b"PK\x03\x04\n\n",
        "is a ZIP archive, not text. Extract the text first, or skip the file with --exclude.",
    ),
    "compressed twice": (
        gzip.compress(gzip.compress(LINES.encode())),
        "is a file compressed with gzip, not text. Extract the text",
    ),
    "a pointer": (POINTER, "is a Git LFS pointer, not the file itself. Run `git lfs pull`"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "--chat a.jsonl", "--chat a.json"])
def test_a_file_of_another_kind_is_told_what_it_is(run, case, name):
    content, message = OTHERS[case]
    *chat, file = name.split()
    Path(file).write_bytes(content)
    status, result, printed = run(*chat, "--input", file)
    assert (status, result) == (2, {}) and f"--input {file} {message}" in printed and printed.count("\n") == 0
    assert run(*chat, "--input", file, "--skip_bad", "1")[1].get("skipped", 1) == 1


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_read_so_is_one_message(run, case):
    files, options, message = REFUSED[case]
    for name, content in files.items():
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status, result, printed = run("--input", *files, *options)
    assert (
        (status, result) == (2, {}) and message in printed and printed.count("\n") == 0 and not Path("x.bin").exists()
    )


def test_a_binary_file_is_skipped_as_a_bad_record(run, monkeypatch):
    monkeypatch.setattr("megalite.data.preparation.sources.LONG_TEXT", 100)
    Path("a.txt").write_bytes(b"\0" * 9)
    Path("b.txt").write_bytes(b"\0" * 900)
    Path("c.txt").write_text("good")
    status, result, _ = run("--input", "a.txt", "b.txt", "c.txt", "--skip_bad", "2")
    assert (status, result["skipped"], documents()) == (0, 2, ["good"])


def zstd(raw: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(raw)
    return sink.getvalue().to_pybytes()


COMPRESSED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}


@pytest.mark.parametrize("end", COMPRESSED)
def test_compressed_files_are_those_that_they_hold(run, end, monkeypatch):
    """In two parts each, as tools that compress in parallel write them; a long text, too, and one whose name does not
    say it."""
    monkeypatch.setattr("megalite.data.preparation.sources.LONG_TEXT", 30)
    pack = COMPRESSED[end]
    files = {
        "a.jsonl": LINES,
        "b.json": json.dumps(RECORDS),
        "c.csv": CSV,
        "d.tsv": CSV.replace(",", "\t").replace("third\t", "third,"),
    }
    files |= {"e.txt": "short", "f.txt": "".join(f"{i} and a longer text\n" for i in range(99)), "g": LINES}
    for name, content in files.items():
        raw = content.encode()
        Path(f"{name}.{end}").write_bytes(pack(raw[:20]) + pack(raw[20:]))
    Path("hidden.jsonl").write_bytes(pack(LINES.encode()))
    status, result, _ = run("--input", *(f"{name}.{end}" for name in files), "hidden.jsonl", "--text_key", "body")
    assert (status, result["input_bytes"] > 0) == (0, True)
    assert documents() == [*TEXTS * 4, files["e.txt"], files["f.txt"], *TEXTS * 2]


def test_compressed_lines_are_the_same_with_any_workers(run, monkeypatch):
    monkeypatch.setattr("megalite.data.preparation.sources.TASK_BYTES", 500)
    lines = [json.dumps({"text": f"{i} {'words ' * (i % 7)}"}) for i in range(300)]
    lines[200] = "bad"
    Path("a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    files = []
    for workers in ("1", "2"):
        status, result, _ = run("--input", "a.jsonl.gz", "--skip_bad", "1", "--workers", workers)
        assert (status, result["documents"], result["input_bytes"]) == (0, 299, os.path.getsize("a.jsonl.gz"))
        assert result["skipped_first"][0].startswith("a.jsonl.gz line 201 is not valid JSON")
        files.append([Path(f"x.{kind}").read_bytes() for kind in ("bin", "idx", "json")])
    assert files[0] == files[1]


def test_null_texts_are_empty_in_every_format(run):
    texts = [TEXTS[0], None, "", TEXTS[1]]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("b.json").write_text(json.dumps([{"text": text} for text in texts]))
    Path("c.csv").write_text("text,id\n" + "".join(f"{text or ''},1\n" for text in texts))
    parquet.write_table(pyarrow.table({"text": texts}), "d.parquet")
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2)}), "e.parquet")
    for name, empty in {"a.jsonl": 2, "b.json": 2, "c.csv": 2, "d.parquet": 2}.items():
        status, result, _ = run("--input", name)
        assert (status, result["empty_documents"], documents()) == (0, empty, TEXTS[:2]), name
    assert run("--input", "d.parquet", "e.parquet")[1]["empty_documents"] == 4
    Path("f.jsonl").write_text('{"text": "a"}\n{"other": "b"}\n')
    assert "f.jsonl line 2 has no key text (--text_key)" in run("--input", "f.jsonl")[2]


def test_a_byte_order_mark_is_no_text(run, monkeypatch):
    monkeypatch.setattr("megalite.data.preparation.sources.LONG_TEXT", 60)
    mark = codecs.BOM_UTF8
    long = "".join(f"line {i}\n" for i in range(20)) + "in \ufeff the middle\n"
    files = {
        "a.txt": b"short",
        "b.txt": long.encode(),
        "d.json": b'[{"text": "entry"}]',
        "e.json": b'{"text": "l"}\n{"text": "m"}\n',
    }
    files |= {
        "f.csv": b"text,id\nrow,1\n",
        "g.txt.gz": b"packed",
        "h.jsonl": b'{"text": "one"}\n' + mark + b'{"text": "two"}\n',
    }
    for name, raw in files.items():
        Path(name).write_bytes(gzip.compress(mark + raw) if name.endswith(".gz") else mark + raw)
    assert run("--input", *files)[0] == 0
    assert documents() == ["short", long, "entry", "l", "m", "row", "packed", "one", "two"]


def test_bytes_and_surrogates_that_are_no_text_are_replaced_and_counted_in_every_format(run):
    Path("a.jsonl").write_bytes(b'{"text": "\xff"}\n{"text": "\\ud800"}\n')
    Path("b.json").write_bytes(b'[{"text": "\xff"}, {"text": "\\uD800"}]')
    Path("c.csv").write_bytes(b"text,id\n\xff,1\nfine,2\n")
    status, result, _ = run("--input", "a.jsonl", "b.json", "c.csv")
    assert (status, result["replaced_documents"], documents()) == (0, 5, ["\ufffd"] * 5 + ["fine"])


@pytest.mark.parametrize("name", ["part-00000", "a.jsonl", "a.json", "a.csv", "a.txt", "a.py"])
def test_a_parquet_file_under_another_name(run, name):
    Path(name).write_bytes(PARQUET)
    assert run("--input", name, "--text_key", "body")[0] == 0 and documents() == TEXTS


def test_a_line_with_nul_bytes_is_one_bad_record(run):
    """A machine that stops while it writes may leave them."""
    Path("a.jsonl").write_bytes(b"\0" * 9 + b"\n" + LINES.encode())
    status, result, _ = run("--input", "a.jsonl", "--text_key", "body", "--skip_bad", "1")
    assert (status, result["skipped"], documents()) == (0, 1, TEXTS)


def test_conversations_are_found_in_every_form_of_json(run):
    messages = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho \ud800"}]}
    Path("a.json").write_text((json.dumps(messages) + "\n") * 2)
    Path("b.json").write_text(json.dumps([messages] * 3, indent=1))
    Path("c.jsonl.gz").write_bytes(gzip.compress((json.dumps(messages) + "\n").encode() * 4))
    Path("d.json").write_text(json.dumps(messages, indent=1))
    Path("t.jinja").write_text("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}")
    words = ("--chat_template", "t.jinja", "--end_of_turn", "optional")
    status, result, _ = run("--chat", "--input", "a.json", "b.json", "c.jsonl.gz", "d.json", *words)
    assert (status, result["documents"], result["replaced_documents"]) == (0, 10, 10)
    assert b"Ho \xef\xbf\xbd" in bytes(token for token in IndexedTokens("x").tokens.tolist() if token < 256)

"""Text files are UTF-8 whatever the locale says: every call that opens one, or reads a program's output, names the
encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.structure.sources import PROGRAM, ROOT, relative

SOURCES = [*PROGRAM, *sorted((ROOT / "benchmarks").rglob("*.py"))]
FILES = {"read_text", "write_text"}
OPEN = {"open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}
PROGRAMS = {"run", "Popen", "check_output", "check_call"}
BINARY = {
    "os.open",
    "gzip.open",
    "bz2.open",
    "lzma.open",
    "tarfile.open",
    "zipfile.ZipFile",
    "SharedMemory.open",
    "TemporaryFile",
    "NamedTemporaryFile",
}
"""Calls that open no text, by default or ever."""


def mode(call: ast.Call, default: str) -> str:
    """The mode that a call opens a file in; of one that is computed, the text of its expression."""
    given = [each.value for each in call.keywords if each.arg == "mode"] or [
        each for each in call.args if is_mode(each)
    ]
    return ast.unparse(given[0]) if given else default


def is_mode(argument: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) and set(each.value) <= set("rwaxbt+")
        for each in ast.walk(argument)
    )


def without_encoding(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that read or write text in the encoding of the locale."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        named = {each.arg for each in call.keywords}
        full = ast.unparse(call.func)
        name = full.rpartition(".")[2]
        if "encoding" in named or (name in FILES and len(call.args) > (name == "write_text")):
            continue
        if name in PROGRAMS and named & {"text", "universal_newlines"}:
            yield call
        if name in FILES:
            yield call
        opens = full == "open" or (name in OPEN and (call.args or named) and full != "os.open")
        if opens and "b" not in mode(call, "b" if full.removeprefix("tempfile.") in BINARY else "r"):
            yield call


def test_text_is_utf_8():
    found = [
        f"{relative(path)}:{call.lineno}"
        for path in SOURCES
        for call in without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"without encoding=: {found}"


def test_what_is_looked_for_is_found():
    wrong = [
        "open(p)",
        "open(p, 'w')",
        "p.open('x')",
        "p.read_text()",
        "p.write_text(t)",
        "subprocess.run(c, text=True)",
        "os.fdopen(f, 'w')",
    ]
    wrong += ["tempfile.TemporaryFile('w+')", "gzip.open(p, 'rt')"]
    right = [
        "open(p, 'rb')",
        "open(p, encoding='utf-8')",
        "p.open('r+b' if q else 'wb')",
        "p.read_text('utf-8')",
        "bucket.open()",
    ]
    right += [
        "tempfile.TemporaryFile()",
        "os.open(p, os.O_RDWR)",
        "datasets(text=True)",
        "p.write_text(t, encoding='utf-8')",
    ]
    assert [code for code in (*wrong, *right) if list(without_encoding(ast.parse(code)))] == wrong

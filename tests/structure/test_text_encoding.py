"""Text is UTF-8 in every locale: each call that opens a text file or reads a program's output names the encoding."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.structure.sources import BENCHMARKS, PROGRAM, parsed, relative

FILES = {"read_text", "write_text"}
OPEN = {"open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}
PROGRAMS = {"run", "Popen", "check_output", "check_call"}
BINARY = {
    *("os.open", "gzip.open", "bz2.open", "lzma.open", "tarfile.open", "zipfile.ZipFile", "SharedMemory.open"),
    *("TemporaryFile", "NamedTemporaryFile"),
}
"""Calls that open binary files, by default or always."""


def mode(call: ast.Call, default: str) -> str:
    """The mode in which a call opens a file; the source of the expression if it is computed."""
    by_keyword = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    modes = by_keyword or [argument for argument in call.args if is_mode(argument)]
    return ast.unparse(modes[0]) if modes else default


def is_mode(argument: ast.expr) -> bool:
    values = [node.value for node in ast.walk(argument) if isinstance(node, ast.Constant)]
    return any(isinstance(value, str) and set(value) <= set("rwaxbt+") for value in values)


def without_encoding(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read or write text in the locale's encoding."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        named = {keyword.arg for keyword in call.keywords}
        full = ast.unparse(call.func)
        name = full.rpartition(".")[2]
        if "encoding" in named or (name in FILES and len(call.args) > (name == "write_text")):
            continue
        if name in PROGRAMS and named & {"text", "universal_newlines"}:
            yield call
        if name in FILES:
            yield call
        opens = full == "open" or (name in OPEN and (call.args or named) and full not in ("os.open", "tarfile.open"))
        if opens and "b" not in mode(call, "b" if full.removeprefix("tempfile.") in BINARY else "r"):
            yield call


def test_text_is_utf_8():
    paths = [*PROGRAM, *BENCHMARKS]
    calls = [f"{relative(path)}:{call.lineno}" for path in paths for call in without_encoding(parsed(path))]
    assert not calls, f"without encoding=: {calls}"


def test_calls_without_an_encoding_are_detected():
    wrong = ["open(p)", "open(p, 'w')", "p.open('x')", "p.read_text()", "p.write_text(t)", "os.fdopen(f, 'w')"]
    wrong += ["subprocess.run(c, text=True)", "tempfile.TemporaryFile('w+')", "gzip.open(p, 'rt')"]
    right = ["open(p, 'rb')", "open(p, encoding='utf-8')", "p.open('r+b' if q else 'wb')", "p.read_text('utf-8')"]
    right += ["p.write_text(t, encoding='utf-8')", "bucket.open()", "tempfile.TemporaryFile()", "datasets(text=True)"]
    right += ["os.open(p, os.O_RDWR)", "tarfile.open(fileobj=f, mode='r|')"]
    assert [code for code in (*wrong, *right) if list(without_encoding(ast.parse(code)))] == wrong

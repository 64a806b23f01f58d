"""The project's files that a training step executes, and a file's number of lines of code."""

from __future__ import annotations

import ast
import io
import sys
import threading
import tokenize
from pathlib import Path
from types import FrameType
from typing import Any

from tests.structure.sources import CORE, relative
from tests.support.jobs import make_trainer
from tests.support.jobs_training import settle

WITHOUT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def executed(context: Any, config: dict[str, Any]) -> set[str]:
    """The core's files of which a function runs on this rank, on any thread, during the first step.

    Methods that a dataclass generates belong to the file of its class.
    """
    files: set[str] = set()
    active = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        if active and event == "call" and frame.f_code.co_name != "<module>":
            file = frame.f_code.co_filename
            if file == "<string>" and "self" in frame.f_locals:
                file = getattr(sys.modules.get(type(frame.f_locals["self"]).__module__), "__file__", None) or file
            files.add(file)

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        trainer = make_trainer(context, config)
        try:
            active = True
            trainer.step()
            settle(trainer)
            active = False
        finally:
            trainer.close()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    core = {str(path): relative(path) for path in CORE}
    return {core[file] for file in map(_resolved, files) if file in core}


def _resolved(file: str) -> str:
    return str(Path(file).resolve())


def code_lines(source: str) -> int:
    """The number of lines with code: without blank lines, comments, docstrings and other string statements."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    # blank lines inside strings
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    return len(lines - texts - blank)

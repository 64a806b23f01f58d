"""Which of the project's files a training step executes, and how many lines of code a file has."""

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
from tests.support.jobs_training import make_trainer, settle

WITHOUT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def executed(context: Any, config: dict[str, Any]) -> set[str]:
    """The core's files of which a function runs on this rank, on any of its threads, during the first step. One that a
    dataclass has made belongs to the file of its class."""
    found: set[str] = set()
    active = False

    def look(frame: FrameType, event: str, _: Any) -> None:
        if active and event == "call" and frame.f_code.co_name != "<module>":
            file = frame.f_code.co_filename
            if file == "<string>" and "self" in frame.f_locals:
                file = getattr(sys.modules.get(type(frame.f_locals["self"]).__module__), "__file__", None) or file
            found.add(file)

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
    return {core[file] for file in map(_resolved, found) if file in core}


def _resolved(file: str) -> str:
    return str(Path(file).resolve())


def code_lines(source: str) -> int:
    """Lines that hold code: no blank line, no comment, no docstring (nor any other text that stands alone)."""
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    # inside a text of several lines
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    return len(lines - texts - blank)

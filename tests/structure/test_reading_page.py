"""docs/reading.md follows a step through functions that exist."""

from __future__ import annotations

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from tests.structure.sources import CORE, ROOT, parsed

PAGE = ROOT / "docs" / "reading.md"
IN_FILE = re.compile(r"`([\w.]+)` in \[[^\]]+\]\((\.\./[^)]+\.py)\)")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
NOT_NAMES = {"F0.1", "SF", "RF", "B", "SB", "RB"}  # actions of a schedule


def own_names(statement: ast.AST) -> set[str]:
    """The name that a statement or argument defines: of a function, class, argument, variable or attribute."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.arg):
        return {statement.arg}
    if isinstance(statement, ast.Name | ast.Attribute) and isinstance(statement.ctx, ast.Store):
        return {statement.id if isinstance(statement, ast.Name) else statement.attr}
    return set()


@cache
def names(path: Path) -> frozenset[str]:
    """The names that a file defines; those inside a class also as `Class.member`."""
    tree = parsed(path)
    defined = {name for node in ast.walk(tree) for name in own_names(node)}
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        defined |= {f"{owner.name}.{name}" for node in ast.walk(owner) if node is not owner for name in own_names(node)}
    return frozenset(defined)


def unknown(text: str) -> list[str]:
    """Names in backticks that their file does not define; without a file, those that no file of the library defines."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    wrong = [name for name, path in IN_FILE.findall(prose) if name not in names((PAGE.parent / path).resolve())]
    everywhere = frozenset().union(*map(names, CORE))
    for code in re.findall(r"`([^`\n]+)`", IN_FILE.sub("", prose)):
        if code.endswith(".py") or "/" in code:
            wrong += [] if (ROOT / code).exists() else [code]
        elif NAME.fullmatch(code) and code not in NOT_NAMES:
            first, *rest = code.split(".")
            # `mesh.traffic`: not of a class
            known = code in everywhere or (first.islower() and everywhere.issuperset([first, *rest]))
            wrong += [] if known else [code]
    return wrong


def test_every_name_exists():
    text = PAGE.read_text()
    assert len(IN_FILE.findall(text)) > 30
    assert unknown(text) == []


@pytest.mark.parametrize("name", ["Trainer.no_such", "NoSuch.step", "no_such", "mesh.no_such", "megalite/no_such.py"])
def test_an_unknown_name_is_found(name: str):
    assert unknown(f"`Trainer` and `{name}`") == [name]


def test_a_name_is_sought_in_the_file_that_it_is_linked_with():
    assert unknown("`Trainer.train_step` in [trainer.py](../megalite/training/trainer.py)") == []
    assert unknown("`Trainer.train_step` in [fit.py](../megalite/training/fit.py)") == ["Trainer.train_step"]


def test_the_site_shows_paths_where_it_has_no_files():
    on_page_markdown = runpy.run_path(str(ROOT / "docs" / "source_links.py"))["on_page_markdown"]
    page = "`fit` in [fit.py](../megalite/training/fit.py), [the mesh](mesh.md), [status](../status.md)"
    assert on_page_markdown(page) == "`fit` in `megalite/training/fit.py`, [the mesh](mesh.md), [status](../status.md)"

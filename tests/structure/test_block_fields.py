"""A field of one mechanism is read by configuration, conversion and its own room, and nowhere else.

Fields of ModelConfig name the kinds of blocks that they belong to (`option(kinds=…)`); a property or method belongs to
the kinds of the fields that it reads. Others ask `megalite/model/kinds.py`, where a kind offers a fact under a general
name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from megalite.config.sections import model as section
from megalite.config.sections.model import ModelConfig
from megalite.model.kinds import KINDS
from tests.structure.sources import ROOT, parsed, relative

READERS = (
    *("megalite/config/", "megalite/families/", "megalite/importers/", "megalite/huggingface/", "megalite/gguf/"),
    "megalite/interchange/",
    "megalite/model/kinds.py",
)
GENERAL = {"block_groups", "block_names"}
"""Methods of ModelConfig that read such fields and whose answer belongs to no mechanism."""
MODELS = {"model", "model_config"}
"""Names of variables and attributes that hold a ModelConfig."""


@cache
def own_kinds() -> dict[str, set[str]]:
    """Each field, property and method of ModelConfig that belongs to kinds → these."""
    kinds = {each.name: set(each.metadata.get("kinds", ())) for each in fields(ModelConfig)}
    tree = ast.parse(Path(section.__file__).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ModelConfig").body
    methods = [node for node in body if isinstance(node, ast.FunctionDef)]
    reads = {
        method.name: {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)} for method in methods
    }
    for _ in methods:  # one may read another
        for name, read in reads.items():
            if name not in GENERAL:
                kinds[name] = set().union(*(kinds.get(each, set()) for each in read))
    return {name: own for name, own in kinds.items() if own}


def room_of(kind: str) -> str:
    return "megalite/model/mtp/" if kind == "mtp" else f"megalite/model/blocks/{kind}/"


@cache
def names_elsewhere() -> set[str]:
    """Names that other classes of megalite have, too: only a read from a model counts."""
    names: set[str] = set()
    for path in (ROOT / "megalite").rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and node.name != "ModelConfig":
                names |= {
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
                names |= {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
                names |= {
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                }
    return names


def reads(tree: ast.AST, names: set[str], shared: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each read of a name: as an attribute, by getattr, or in a call of replace."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            holder = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if node.attr not in shared or holder in MODELS:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called == "replace":
                yield from ((node.lineno, each.arg) for each in node.keywords if each.arg in names)
            elif called in ("getattr", "hasattr", "attrgetter"):
                words = [each.value for each in node.args if isinstance(each, ast.Constant)]
                yield from ((node.lineno, word) for word in words if word in names)


def misplaced(name: str, tree: ast.AST, kinds: dict[str, set[str]], shared: set[str]) -> list[str]:
    """The reads in a file, relative to the repository, that belong to a room elsewhere."""
    if name.startswith(READERS):
        return []
    return [
        f"{name}:{line}: {field} belongs to {', '.join(sorted(kinds[field]))}: ask megalite/model/kinds.py"
        for line, field in reads(tree, set(kinds), shared)
        if not name.startswith(tuple(map(room_of, kinds[field])))
    ]


def test_kinds_of_fields_exist():
    assert set().union(*own_kinds().values()) <= {*KINDS, "mtp"}


def test_fields_are_read_in_their_rooms():
    kinds, shared = own_kinds(), names_elsewhere()
    wrong = []
    for path in sorted((ROOT / "megalite").rglob("*.py")):
        wrong += misplaced(relative(path), parsed(path), kinds, shared)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source, field",
    [
        ("rows = config.model.num_experts", "num_experts"),
        ("rows = search.base.num_experts_per_tok", "num_experts_per_tok"),
        ("kept = model.window(3)", "window"),
        ("without = replace(model, mtp_layers=0)", "mtp_layers"),
        ("rank = getattr(model, 'kv_lora_rank')", "kv_lora_rank"),
        ("dense = not units.model.is_mixture(2)", "is_mixture"),
        ("size = layer.model_config.head_size", "head_size"),
    ],
)
def test_a_read_elsewhere_is_found(source, field):
    (line,) = misplaced("megalite/planner/some.py", ast.parse(source), own_kinds(), names_elsewhere())
    assert line.startswith(f"megalite/planner/some.py:1: {field} belongs to ")
    assert not misplaced("megalite/config/some.py", ast.parse(source), own_kinds(), names_elsewhere())


def test_other_classes_may_have_such_names():
    assert not misplaced(
        "megalite/planner/a.py", ast.parse("step.window, step.head_size"), own_kinds(), names_elsewhere()
    )

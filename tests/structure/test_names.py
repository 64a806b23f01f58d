"""Names say what a thing holds, and each class has a name of its own."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.structure.sources import BENCHMARKS, PROGRAM, ROOT, parsed, relative

TESTS = ROOT / "tests"
SHARED = {"Loader": "PyYAML's name for a class of this kind; the one in load.py is local to a function"}
"""Names that several classes have, with the reason."""
VAGUE = {"found", "made", "asked", "told"}
NAMED_BY_CONTENT = [*PROGRAM, *BENCHMARKS, *TESTS.rglob("*.py")]
UNCHANGED = {"tests/distributed/test_bitwise.py": "the proof of bits changes only where what it proves does"}
"""Files with vague names, with the reason."""


def classes(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def vague_names(tree: ast.Module) -> Iterator[str]:
    """Variables, parameters and attributes that code assigns or declares under a vague name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.strip("_") in VAGUE:
            yield f"line {node.lineno}: {name}"


def shared_names(trees: Iterable[tuple[str, ast.Module]]) -> dict[str, list[str]]:
    """Class names that are defined more than once, with their files."""
    files: dict[str, list[str]] = defaultdict(list)
    for file, tree in trees:
        for name in classes(tree):
            files[name].append(file)
    return {name: where for name, where in files.items() if len(where) > 1}


def test_a_class_name_is_used_once():
    shared = shared_names((relative(path), parsed(path)) for path in [*PROGRAM, *BENCHMARKS])
    assert {name: where for name, where in shared.items() if name not in SHARED} == {}
    assert [name for name in SHARED if name not in shared] == [], "exceptions that are no longer needed"


def test_variables_are_named_by_their_content():
    vague = {relative(path): list(vague_names(parsed(path))) for path in NAMED_BY_CONTENT}
    assert {file: names for file, names in vague.items() if names and file not in UNCHANGED} == {}
    assert [file for file in UNCHANGED if not vague[file]] == [], "exceptions that are no longer needed"


def test_a_shared_class_name_and_vague_names_are_detected():
    source = "class A: pass\ndef f(found, x):\n    self._made = x.told\n    class A: asked: int\n"
    tree = ast.parse(source)
    assert shared_names([("a.py", tree)]) == {"A": ["a.py", "a.py"]}
    assert sorted(vague_names(tree)) == ["line 2: found", "line 3: _made", "line 4: asked"]

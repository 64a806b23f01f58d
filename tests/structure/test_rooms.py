"""Where things are: commands, shims in tools/, packages with a docstring and no code, imports on first use."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import megalite
from megalite.commands.start import COMMANDS
from tests.structure.sources import ROOT, parsed, python, relative

PACKAGES = sorted((ROOT / "megalite").rglob("__init__.py"))
SHIMS = sorted((ROOT / "tools").glob("*.py"))
LONGEST_SHIM = 10
ELSEWHERE = ("ray_shards", "datatrove_shards", "deduplicate")
HELP = """
import sys
sys.argv = ["megalite", sys.argv[1], "--help"]
from megalite.__main__ import main
try:
    main()
finally:
    print([name for name in sys.modules if name == "torch" or name.startswith("megalite.commands.")])
"""
RUN = """
import runpy, sys
sys.argv = ["megalite", *sys.argv[1:]]
sys.stderr = sys.stdout
try:
    runpy.run_module("megalite", run_name="__main__")
except SystemExit as end:
    print(end.code)
"""
HEAVY = ("torch", "numpy", "yaml", "jsonargparse", "megalite.config", "megalite.training")


def test_tools_holds_shims_and_no_package():
    """And programs for environments that need not have megalite."""
    scripts = {ROOT / "tools" / "preparation" / f"{name}.py" for name in ELSEWHERE}
    assert [relative(path) for path in (ROOT / "tools").rglob("*.py") if path not in {*SHIMS, *scripts}] == []
    lines = {relative(path): len(path.read_text().splitlines()) for path in SHIMS}
    assert {file: count for file, count in lines.items() if count > LONGEST_SHIM} == {}


def test_every_command_is_a_module_and_has_a_shim():
    modules = {name: ROOT / "megalite" / "commands" / f"{name.replace('-', '_')}.py" for name in COMMANDS}
    assert all(path.is_file() for path in modules.values())
    shims = [path.read_text() for path in (*SHIMS, ROOT / "pretrain.py")]
    assert [name for name in COMMANDS if not any(f'start("{name}")' in shim for shim in shims)] == []


@pytest.mark.parametrize("path", PACKAGES, ids=relative)
def test_a_package_says_what_it_is_for_and_defines_nothing(path: Path):
    tree = parsed(path)
    assert ast.get_docstring(tree)
    definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    defined = {node.name for node in ast.walk(tree) if isinstance(node, definitions)}
    allowed = {"__getattr__"} if path.parent == ROOT / "megalite" else set()
    assert defined <= allowed, "a definition in __init__.py is hard to find"


def test_the_public_names_are_imported_when_they_are_used():
    assert python(f"import sys, megalite; print([name for name in {HEAVY} if name in sys.modules])") == "[]\n"
    kinds = {name: type(getattr(megalite, name)).__name__ for name in megalite.__all__}
    assert kinds == {
        **{"Config": "type", "Mesh": "type", "Trainer": "type"},
        **{"fit": "function", "load_config": "function", "make_mesh": "function", "__version__": "str"},
    }
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        getattr(megalite, "Trainr")  # noqa: B009 — as a user's typing error would


@pytest.mark.parametrize("command", ["bubble", "plan", "prepare"])
def test_only_the_chosen_command_is_imported(command: str):
    imported = ast.literal_eval(python(HELP, command).splitlines()[-1])
    assert set(imported) == {f"megalite.commands.{name}" for name in (command, "parser", "start")}


def test_the_console_command_names_its_commands_and_the_nearest_to_a_wrong_one():
    *listed, status = python(RUN, "--help").splitlines()
    assert status == "0" and all(any(line.split()[:1] == [name] for line in listed) for name in COMMANDS)
    assert python(RUN, "plam") == "megalite: plam is not a command. Nearest: plan. See megalite --help.\n2\n"
    first, *_, status = python(RUN, "--version").splitlines()
    assert first.startswith(f"megalite {megalite.__version__}") and status == "0"
    code = f"{RUN}print('torch' in sys.modules)"
    versions, status, torch_imported = python(code, "--version", "--json").splitlines()
    assert {"megalite", "python", "torch", "triton", "devices", "commit"} <= json.loads(versions).keys()
    assert (status, torch_imported) == ("0", "False")

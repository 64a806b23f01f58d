"""Where things are: command lines, shims in tools/, packages that say what they are for, and imports only of what is
used."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import megalite
from megalite.commands.start import COMMANDS
from tests.structure.sources import ROOT, python, relative

PACKAGES = sorted((ROOT / "megalite").rglob("__init__.py"))
SHIMS = sorted((ROOT / "tools").glob("*.py"))
LONGEST_SHIM, LONGEST_PURPOSE = 10, 10
HEAVY = ("torch", "numpy", "yaml", "jsonargparse", "megalite.config", "megalite.training")


def test_tools_holds_shims_and_no_package():
    assert [relative(path) for path in (ROOT / "tools").rglob("*.py") if path not in SHIMS] == []
    assert {
        relative(path): len(path.read_text().splitlines())
        for path in SHIMS
        if len(path.read_text().splitlines()) > LONGEST_SHIM
    } == {}


def test_every_command_is_a_module_and_has_a_shim():
    modules = {name: ROOT / "megalite" / "commands" / f"{name.replace('-', '_')}.py" for name in COMMANDS}
    assert all(path.is_file() for path in modules.values())
    started = {
        name for name in COMMANDS for path in (*SHIMS, ROOT / "pretrain.py") if f'start("{name}")' in path.read_text()
    }
    assert started == set(COMMANDS)


@pytest.mark.parametrize("path", PACKAGES, ids=relative)
def test_a_package_says_what_it_is_for_and_defines_nothing(path: Path):
    tree = ast.parse(path.read_text())
    purpose = ast.get_docstring(tree)
    assert purpose and len(purpose.splitlines()) <= LONGEST_PURPOSE
    defined = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert defined <= ({"__getattr__"} if path.parent == ROOT / "megalite" else set()), (
        "what stands in a package itself is hard to find"
    )


def test_the_public_names_are_imported_when_they_are_used():
    assert python(f"import sys, megalite; print([name for name in {HEAVY} if name in sys.modules])") == "[]\n"
    kinds = {name: type(getattr(megalite, name)).__name__ for name in megalite.__all__}
    assert kinds == {
        **dict.fromkeys(("Config", "Mesh", "Trainer"), "type"),
        **dict.fromkeys(("fit", "load_config", "make_mesh"), "function"),
        "__version__": "str",
    }
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        getattr(megalite, "Trainr")  # noqa: B009 — as a user's typing error would


@pytest.mark.parametrize("command", ["bubble", "plan", "prepare"])
def test_only_the_chosen_command_is_imported(command: str):
    code = (
        "import sys\nsys.argv = ['megalite', sys.argv[1], '--help']\nfrom megalite.__main__ import main\ntry:\n    "
        "main()\nfinally:\n    "
    )
    code += "print([name for name in sys.modules if name == 'torch' or name.startswith('megalite.commands.')])"
    imported = ast.literal_eval(python(code, command).splitlines()[-1])
    assert set(imported) == {f"megalite.commands.{name}" for name in (command, "parser", "start")}


def test_the_console_command_names_its_commands_and_the_nearest_to_a_wrong_one():
    code = "import runpy, sys\nsys.argv = ['megalite', *sys.argv[1:]]\nsys.stderr = sys.stdout\ntry:\n    "
    code += "runpy.run_module('megalite', run_name='__main__')\nexcept SystemExit as end:\n    print(end.code)"
    *listed, status = python(code, "--help").splitlines()
    assert status == "0" and all(any(line.split()[:1] == [name] for line in listed) for name in COMMANDS)
    assert python(code, "plam") == "megalite: plam is not a command. Nearest: plan. See megalite --help.\n2\n"
    first, *_, status = python(code, "--version").splitlines()
    assert first.startswith(f"megalite {megalite.__version__}") and status == "0"
    found, imported = python(f"{code}\nprint('torch' in sys.modules)", "--version", "--json").splitlines()[::2]
    assert {"megalite", "python", "torch", "triton", "devices", "commit"} <= json.loads(
        found
    ).keys() and imported == "False"

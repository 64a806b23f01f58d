"""Every command of README.md runs as written, in one directory, with options appended that keep it short."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from megalite.commands.start import COMMANDS as NAMES
from tests.data.chats import CHATML
from tests.structure.newcomer import commands, make_place, run, shortened
from tests.structure.sources import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = commands("README.md")
# test_packaging.py installs
INSTALL = ["python3 -m venv .venv", ". .venv/bin/activate", "pip install -c constraints.txt -e '.[data]'"]
MAKE = ["make demo", "make test"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return make_place(tmp_path_factory.mktemp("readme"))


def test_every_other_command_than_these_is_run():
    programs = {command.words[0] for command in COMMANDS if command.text not in (*INSTALL, *MAKE)}
    assert programs == {"megalite", "python"}


def test_the_table_has_every_command():
    table = (ROOT / "docs" / "commands.md").read_text()
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(NAMES)


def test_the_extras_are_those_of_the_project():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    paragraph = README[README.index("Extras:") :].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)` \(", paragraph)) <= extras


def test_commands_run_in_order(place):
    for command in COMMANDS:
        if command.text in (*INSTALL, *MAKE):
            continue
        done = run(shortened(command.words), place)
        assert done.returncode == 0, f"{command.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        if command.output:
            (place / command.output).write_text(done.stdout)
    base, chat = place / "models" / "llama", place / "models" / "llama-chat"
    assert (chat / "model.safetensors").read_bytes() != (base / "model.safetensors").read_bytes()
    assert (chat / "chat_template.jinja").read_text() == CHATML
    # what the page shows
    assert (place / "zb-v.svg").read_bytes() == (ROOT / "docs" / "pictures" / "zb-v.svg").read_bytes()


def test_the_lines_of_python_train(place):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    short = '"--tp", "2", "--run.name", "python", "--train.steps", "2", "--model.num_hidden_layers", "2"'
    prepare = next(command.words for command in COMMANDS if "prepare" in command.words)
    assert run(shortened(prepare), place).returncode == 0  # nothing to do if it has run
    (place / "train.py").write_text(code.replace('"--tp", "2"', short))
    done = run(["torchrun", "--nproc-per-node", "2", "train.py"], place)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len((place / "runs" / "python" / "metrics.jsonl").read_text().splitlines()) >= 2


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_targets_set_themselves_up(target, place):
    """What they then run is tested elsewhere: here, that a clone without .venv would build one and use it."""
    done = run(["make", "-n", target], place)
    assert done.returncode == 0
    assert all(part in done.stdout for part in ("-m venv .venv", "pip install", ".venv/bin/python"))


def test_mesh_command_prints_the_picture(place):
    done = run(["python", "-m", "megalite.mesh", "--tp", "2", "--pp", "2", "--dp", "2"], place)
    assert done.returncode == 0 and "tp ranks [6, 7]" in done.stdout

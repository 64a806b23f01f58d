"""Every command of README.md runs as written there, in a directory of its own, with sizes appended that keep it short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from megalite.commands.start import COMMANDS as NAMES
from tests.data.chats import CHATML, write_lines, write_tokenizer
from tests.huggingface.hf_models import SIZES, Case
from tests.huggingface.hf_models import write as write_model

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
INSTALL = ["python3 -m venv .venv", ". .venv/bin/activate", "pip install -c constraints.txt -e '.[data]'"]  # test_packaging.py installs
MAKE = ["make demo", "make test"]
SMALL_BATCH = "--train.micro_batch_size 2 --data.sequence_length 32"
SHORT = {  # appended: later options win
    "prepare": "--workers 1",
    "train": f"--train.steps 2 --optimizer.warmup_steps 1 --train.global_batch_size 4 {SMALL_BATCH}",
    "generate": "--tokens 3",
    "verify": f"--data.train data/corpus --train.global_batch_size 8 {SMALL_BATCH}",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """What a newcomer has: a clone, a corpus of text files, a configuration of another program, a small Llama and conversations for it."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("tools", "configs", "pretrain.py", "megalite", "Makefile", "pyproject.toml", "constraints.txt"):
        (place / name).symlink_to(ROOT / name)
    (place / "ds_config.json").write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    sizes = {**SIZES, "vocab_size": 264, "tie_word_embeddings": True}
    write_tokenizer(write_model(Case("Llama", sizes), place / "models" / "llama"), CHATML)
    answer = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    write_lines(place / "chats.jsonl", [answer] * 40)
    (place / "corpus").mkdir()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]:  # enough text for 8,192 pieces
        (place / "corpus" / f"{source.stem}.txt").write_bytes(source.read_bytes())
    return place


def run(command: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # `make test` may have started this
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=240)


def runnable(words: list[str]) -> list[str]:
    """A command of the README with the programs of this environment, as an activated one would find them."""
    programs = {
        "megalite": [sys.executable, "-m", "megalite"],
        "python": [sys.executable],
    }
    return [*programs[words[0]], *words[1:]]


def shortened(words: list[str]) -> list[str]:
    if "--dry_run" in words or "megalite" not in words:
        return words
    return [*words, *shlex.split(SHORT.get(words[words.index("megalite") + 1], ""))]


def test_every_other_command_than_these_is_run():
    programs = {shlex.split(command)[0] for command in COMMANDS if command not in (*INSTALL, *MAKE)}
    assert programs == {"megalite", "python"}


def test_the_table_has_every_command():
    table = README[README.index("## Commands") :].split("\n\n")[1]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == list(NAMES)


def test_the_extras_are_those_of_the_project():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    said = README[README.index("Extras:") :].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)` \(", said)) <= extras and all("[data]" in line for line in INSTALL if "pip" in line)


def test_it_is_short():
    assert len(README.splitlines()) <= 130


def test_commands_run_in_order(place):
    for command in COMMANDS:
        if command in (*INSTALL, *MAKE):
            continue
        command, _, output = command.partition(" > ")
        done = run(runnable(shortened(shlex.split(command))), place)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        if output:
            (place / output).write_text(done.stdout)
    made = place / "models" / "llama-chat"
    assert (made / "model.safetensors").read_bytes() != (place / "models" / "llama" / "model.safetensors").read_bytes()
    assert (made / "chat_template.jinja").read_text() == CHATML
    assert (place / "zb-v.svg").read_bytes() == (ROOT / "docs" / "pictures" / "zb-v.svg").read_bytes()  # what the page shows


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_targets_set_themselves_up(target, place):
    """What they then run is tested elsewhere: here, that a clone without .venv would build one and use it."""
    done = run(["make", "-n", target], place)
    assert done.returncode == 0
    assert "-m venv .venv" in done.stdout and "pip install" in done.stdout and ".venv/bin/python" in done.stdout.splitlines()[-1]


def test_mesh_command_prints_the_picture(place):
    done = run([sys.executable, "-m", "megalite.mesh", "--tp", "2", "--pp", "2", "--dp", "2"], place)
    assert done.returncode == 0 and "tp ranks [6, 7]" in done.stdout

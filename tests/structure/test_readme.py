"""Every command of README.md runs as written there, in a directory of its own, with sizes appended that keep it short."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.data.chats import CHATML, write_lines, write_tokenizer
from tests.huggingface.hf_models import SIZES, Case
from tests.huggingface.hf_models import write as write_model

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) for line in block.splitlines()]
SMALL_BATCH = "--train.micro_batch_size 2 --data.sequence_length 32"
SHORT = {  # appended: later options win
    "tools/prepare_data.py": "--workers 1",
    "pretrain.py": f"--train.steps 2 --optimizer.warmup_steps 1 --train.global_batch_size 4 {SMALL_BATCH}",
    "tools/generate.py": "--tokens 3",
    "tools/checkpoint.py": "",
    "tools/convert_hf.py": "",
    "tools/bubble_calc.py": "",
    "tools/plan.py": "",
    "tools/report.py": "",
    "tools/import_config.py": "",
    "tools/verify.py": f"--data.train data/corpus --train.global_batch_size 8 {SMALL_BATCH}",
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


def script(words: list[str]) -> str:
    return next((word for word in words if word.endswith(".py")), "")


def test_the_commands_are_those_known_here():
    scripts = {script(shlex.split(command)) for command in COMMANDS}
    assert scripts == {"", *SHORT}
    assert {command for command in COMMANDS if not script(shlex.split(command))} == {"make demo", "make test"}


def test_commands_run_in_order(place):
    for command in COMMANDS:
        command, _, output = command.partition(" > ")
        words = shlex.split(command)
        if not script(words):
            continue
        binaries = Path(sys.executable).parent
        words = [str(binaries / word.removeprefix(".venv/bin/")) if word.startswith(".venv/bin/") else word for word in words]
        shortened = [] if "--dry_run" in words else shlex.split(SHORT[script(words)])
        done = run([*words, *shortened], place)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        if output:
            (place / output).write_text(done.stdout)
    made = place / "models" / "llama-chat"
    assert (made / "model.safetensors").read_bytes() != (place / "models" / "llama" / "model.safetensors").read_bytes()
    assert (made / "chat_template.jinja").read_text() == CHATML


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_targets_set_themselves_up(target, place):
    """What they then run is tested elsewhere: here, that a clone without .venv would build one and use it."""
    done = run(["make", "-n", target], place)
    assert done.returncode == 0
    assert "-m venv .venv" in done.stdout and "pip install" in done.stdout and ".venv/bin/python" in done.stdout.splitlines()[-1]


def test_mesh_command_prints_the_picture(place):
    done = run([sys.executable, "-m", "megalite.mesh", "--tp", "2", "--pp", "2", "--dp", "2"], place)
    assert done.returncode == 0 and "tp ranks [6, 7]" in done.stdout

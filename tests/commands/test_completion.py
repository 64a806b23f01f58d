"""Completion, as a shell does it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megalite.commands import completion
from megalite.commands.start import COMMANDS

ASK = 'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _megalite; echo "${COMPREPLY[*]}"; }'


@pytest.fixture(scope="module")
def grammar() -> dict[str, completion.Grammar]:
    return completion.commands()


def test_bash_completes_commands_options_choices_and_files(grammar, tmp_path: Path):
    (tmp_path / "own.yaml").touch()
    script = tmp_path / "megalite.bash"
    script.write_text(completion.bash(grammar))
    expected = {
        "megalite pl": "plan",
        "megalite plan --mo": "--model",
        "megalite plan --model llama-3-7": "llama-3-70b",
        "megalite plan --write o": "own.yaml",
        "megalite train --config quick": "quickstart",
        "megalite train --config ow": "own.yaml",
        "megalite train --parallel.schedule zb": "zb-h1 zb-h2 zb-v",
        "megalite train --zero": "--zero",
        "megalite train --nn": "--nnodes",
        "megalite verify --ste": "--steps",
        "megalite convert adapter": "adapter-export",
        "megalite convert export --shard": "--shard_size",
        "megalite evaluate tasks x --precision b": "bf16",
        "megalite generate o": "own.yaml",
        "megalite completion f": "fish",
    }
    lines = "".join(f"\ntry {words}" for words in expected)
    done = subprocess.run(
        ["bash", "-c", f"source {script}\n{ASK}{lines}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert dict(zip(expected, done.stdout.splitlines(), strict=True)) == expected and not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command(grammar, shell: str, tmp_path: Path):
    text = {"zsh": completion.zsh, "fish": completion.fish}[shell](grammar)
    assert all(name in text for name in COMMANDS)
    if shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)

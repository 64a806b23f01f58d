"""Every command of the manual runs as written, page by page, in one newcomer's directory, on small inputs.

The title of a block names what it needs; where that is missing, the part of it that can run is run. A page may use the
files that earlier pages produce. `pytest -m manual` runs these tests; they start many processes, so a usual run of the
suite skips them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.data.test_formats_page import write_examples
from tests.structure.newcomer import ROOT, Command, commands, make_place, run, runnable, shortened

FIRST = ["first-run", "data", "finetuning", "huggingface", "generation", "evaluation", "checkpoints"]
BY_NAME = {page.stem: f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))}
PAGES = (
    [BY_NAME[name] for name in FIRST]
    + [page for name, page in BY_NAME.items() if name not in FIRST and commands(page)]
    + ["CONTRIBUTING.md"]
)
TITLES = {"", "needs a GPU", "needs a network", "needs Docker", "needs SLURM", "on every node", "until Ctrl-C"}
ELSEWHERE = ("make demo",)  # .ci/run runs it
FEWER_RANKS = {"--nproc 8": "--nproc 4", "--nproc-per-node 8": "--nproc-per-node 2"}
SMALLER = {
    ("train", "hang:rank=1"): "--train.steps 14 --train.watchdog 3s --run.timeout 8s",
    ("train", "return:rank=0"): "--train.steps 30",
    ("train", "--checkpoint.copy_interval"): "--train.steps 16",
    ("train", "--profiling.steps"): "--train.steps 12",
    ("train", "finetune-"): "--data.sequence_length 64",
    ("train", "--train.objective"): "--validation.interval 2",
    ("prepare", "--max_length"): "--max_length 65",
    ("score", "--top_k"): "--sequence_length 64",
    ("plan", "llama-3-70b"): "--plans 1",
}
ENDS_WITH = {"hang:rank=1": 1}  # its second fault comes after the one restart
NODES = {
    "--nnodes 4": "--nnodes 2",
    "--nnodes 2:4": "--nnodes 2:2",
    "--parallel.min_ranks 16": "--parallel.min_ranks 4",
    "--nproc 8": "--nproc 2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--tp 8 --pp 1 --dp 4": "--tp 2 --pp 1 --dp 2",
    "/shared/": "",
}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
TINY = [word for name, size in SIZES.items() for word in (f"--model.{name}", str(size))]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = make_place(tmp_path_factory.mktemp("manual"))
    (place / "book.txt").write_bytes((place / "corpus" / "argparse.txt").read_bytes() * 2)
    (place / "corpus" / "a.jsonl").write_text(json.dumps({"text": (place / "corpus" / "ast.txt").read_text()}) + "\n")
    (place / "prompts.txt").write_text("It was\n")
    (place / "questions.txt").write_text("Who?\n")
    return place


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def appended(words: list[str], table: dict[tuple[str, str], str]) -> list[str]:
    """The options that the table appends to a command."""
    text = " ".join(words)
    return [
        word for (name, part), more in table.items() if name in words and part in text for word in shlex.split(more)
    ]


def as_written(command: Command, place: Path) -> Iterator[tuple[list[str], int]]:
    """The words to run for a command, with its expected exit status."""
    text = replaced(command.text, {**FEWER_RANKS, "file:///tmp/": f"file://{place}/"})
    words = shortened(shlex.split(text, comments=True))
    yield [*words, *appended(words, SMALLER)], next((status for part, status in ENDS_WITH.items() if part in text), 0)


def without_a_gpu(command: Command, place: Path) -> Iterator[tuple[list[str], int]]:
    """The program and its options exist."""
    yield [*command.words, "--help"], 0


def without_slurm(command: Command, place: Path) -> Iterator[tuple[list[str], int]]:
    """A dry run with the options after the script, on the number of nodes that sbatch's options before it give."""
    words = command.words
    script = next(number for number, word in enumerate(words) if word.endswith(".sbatch"))
    assert (ROOT / words[script]).is_file() and words[1] == "--nodes"
    dry = ["--dry_run", "--world_size", str(8 * int(words[2])), "--model.vocab_size", "128256"]
    yield ["megalite", "train", *words[script + 1 :], *dry], 0


def without_docker(command: Command, place: Path) -> Iterator[tuple[list[str], int]]:
    """The command inside the container: the words after the image's name are arguments of `megalite`."""
    if command.words[1] == "run":
        words = command.words[command.words.index("megalite") + 1 :]
        yield shortened(["megalite", *words]), 0


RUN = {
    "needs Docker": without_docker,
    "": as_written,
    "needs a GPU": without_a_gpu,
    "needs a network": without_a_gpu,
    "needs SLURM": without_slurm,
}


def on_two_nodes(command: Command, place: Path) -> None:
    """Runs the command twice at the same time on one machine."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = replaced(command.text.replace("node0:29500", f"127.0.0.1:{port}"), NODES)
    words = [*shortened(shlex.split(text)), *TINY, "--run.name", f"nodes-{port}"]
    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(lambda _: run(words, place), range(2))
    for done in (first, second):
        check(command, done, 0)


def until_interrupted(command: Command, place: Path) -> None:
    """Interrupts the command once it works; it ends with one line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        runnable(command.words), cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and "Ctrl-C" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "interrupted\n")


SPECIAL = {"on every node": on_two_nodes, "until Ctrl-C": until_interrupted}


def check(command: Command, done: subprocess.CompletedProcess[str], status: int) -> None:
    assert done.returncode == status, f"{command.page}: {command.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_every_command_is_in_a_block_that_is_run():
    assert set(ELSEWHERE) <= set((ROOT / ".ci" / "run").read_text().splitlines())
    programs = re.compile(r"^(\$ |megalite |torchrun |python |sbatch |srun |make |pip )", re.MULTILINE)
    for page in (*PAGES, "README.md", *BY_NAME.values()):
        others = re.sub(r"^```sh.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        blocks = "".join(re.findall(r"^```(?:bash|console|)\n(.*?)^```", others, re.MULTILINE | re.DOTALL))
        assert not programs.findall(blocks), f"{page}: commands belong into blocks of sh"
        assert {command.title for command in commands(page)} <= TITLES, page


@pytest.mark.manual
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(page, place, monkeypatch):
    if page == BY_NAME["data"]:
        monkeypatch.chdir(place)
        write_examples()
    programs = re.findall(r'^```python title="(\S+)"\n(.*?)^```', (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    for name, text in programs:
        (place / name).write_text(text)
    for command in commands(page):
        if command.text in ELSEWHERE or command.words[0] in (".", "make", "pip"):
            continue
        if command.title in SPECIAL:
            SPECIAL[command.title](command, place)
            continue
        for words, status in RUN[command.title](command, place):
            done = run(words, place, command.redirected)
            check(command, done, status)
            if command.output:
                (place / command.output).write_text(done.stdout)

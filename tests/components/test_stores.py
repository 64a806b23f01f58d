"""Runs, checkpoints and data in a store with the interface of S3 (moto), through s3fs.

`MEGALITE_STORE_KILLS=50` sets the number of kills.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.checkpoint import Manifest, step_number
from tests.components.environments import python_of
from tests.components.forks import Forks
from tests.components.s3_server import BUCKET, Proxy, Request, S3Server, descendants, s3_server
from tests.structure.sources import ROOT
from tests.support.configs import write_tokens

FAILING_S = 20.0
KILLS = int(os.environ.get("MEGALITE_STORE_KILLS", 4))
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
OPTIONS = [
    *(word for key, value in MODEL.items() for word in (f"--model.{key}", str(value))),
    *("--data.sequence_length", "32", "--train.global_batch_size", "8", "--train.micro_batch_size", "4"),
    *("--train.precision", "fp32", "--optimizer.decay", "constant", "--optimizer.warmup_steps", "0"),
    *("--checkpoint.interval", "1", "--checkpoint.keep", "2", "--store.part_mb", "0.3", "--store.retry", "1s"),
]
OURS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
IMPORTED = ["torch", "megalite.training.fit", "megalite.commands.train", "s3fs"]
URL = f"s3://{BUCKET}/runs"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    started = Proxy(server)
    yield started
    started.close()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), 257)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    started = Forks(python_of("stores"), IMPORTED, {**os.environ, **OURS})
    yield started
    started.close()


class Machine:
    """A directory with the spool of runs and a cache, and the commands that use a store from there."""

    def __init__(self, directory: Path, proxy: Proxy, tokens: str, forks: Forks):
        self.directory, self._tokens, self._forks = directory, tokens, forks
        self._output = directory.with_suffix(".output")
        self._environment = {
            **os.environ,
            **proxy.environment,
            "MEGALITE_CACHE": str(directory / "cache"),
            **OURS,
        }

    def start(self, *words: str) -> int:
        """Start `megalite WORDS …`, and return its process id."""
        self.directory.mkdir(exist_ok=True)
        return self._forks.start(["megalite", *words], self.directory, self._environment, self._output)

    def end(self) -> tuple[int, str]:
        """Wait for the command. Returns its status and output."""
        return self._forks.wait(), self._output.read_text()

    def run(self, *words: str, status: int = 0) -> str:
        self.start(*words)
        ended, output = self.end()
        assert ended == status, output
        return output

    def training(self, name: str, steps: int, *others: str, data: str = "", url: str = URL) -> list[str]:
        where = ["--run.dir", url, "--run.name", name, "--data.train", data or self._tokens]
        return ["train", *where, "--train.steps", str(steps), *OPTIONS, *others]


def whole_steps(server: S3Server, name: str, place: Path) -> tuple[set[int], int | None]:
    """The published checkpoints of a run, each of which must be whole to its last byte, and what `latest` names."""
    prefix = f"runs/{name}/checkpoints/"
    keys = server.keys(prefix)
    steps = {step_number(key.split("/")[-2]) for key in keys if key.endswith("/manifest.json")}
    for step in steps:
        directory = place / f"{step}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for key in keys:
            if key.startswith(f"{prefix}step_{step:08d}/"):
                (directory / key.rpartition("/")[2]).write_bytes(server.read(key))
        assert Manifest.of(directory).verify() > 1e6  # raises where a byte is missing or wrong
    named = server.read(f"{prefix}latest").decode() if f"{prefix}latest" in keys else None
    return {step for step in steps if step is not None}, named and step_number(named.strip())


def losses(lines: str) -> dict[int, tuple[float, float]]:
    records = [json.loads(line) for line in lines.splitlines()]
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records}


def test_kills_lose_nothing_that_was_published(server, proxy, tokens, forks, tmp_path):
    machine, chance = Machine(tmp_path / "machine", proxy, tokens, forks), random.Random(7)
    last = 2 * KILLS + 3
    machine.run(*machine.training("local", last, "--checkpoint.interval", "1000", url=str(tmp_path)))
    machine.run(*machine.training("killed", 1))
    first = next(i for i, request in enumerate(proxy.requests) if request.starts_a_save)
    parts = [request for request in proxy.requests if "partNumber" in request.path]
    assert len(parts) >= 3
    of_a_save = len(proxy.requests) - first
    before, latest, kinds = {1}, 1, set[str]()
    for number in range(KILLS):
        elsewhere = number % 2 == 1  # each second restart is on a machine that has nothing
        if elsewhere:
            shutil.rmtree(machine.directory / "runs")
        # uniform over the requests of a save, in equal parts before and after the server has seen one
        at, sees = 1 + of_a_save * number // KILLS, chance.random() < 0.5
        killed, output = _killed(machine, proxy, last, at, sees)
        kinds.add(killed.method)
        assert not elsewhere or f"resumed after step {latest}," in output
        after, named = whole_steps(server, "killed", tmp_path / "check")
        assert named in after and named >= latest and max(after) >= max(before), (before, after, killed)
        assert len(after) >= min(2, len(before)), (before, after, killed)
        before, latest = after, named
    proxy.reset()
    shutil.rmtree(machine.directory / "runs")
    output = machine.run(*machine.training("killed", last))
    assert f"resumed after step {latest}," in output
    assert server.unfinished() == []
    after, named = whole_steps(server, "killed", tmp_path / "check")
    assert (after, named) == ({last - 1, last}, last)
    own = (tmp_path / "local" / "metrics.jsonl").read_text()
    assert losses(server.read("runs/killed/metrics.jsonl").decode()) == losses(own)
    assert {"PUT", "POST"} <= kinds


def _killed(machine: Machine, proxy: Proxy, steps: int, at: int, sees: bool) -> tuple[Request, str]:
    """Train until the at-th request from the begin of a save, and kill the process there. Returns the request and what
    the process has printed.

    Args:
        sees: whether the server has seen the request.
    """
    proxy.reset()
    listed: list[Request] = []

    def count(request: Request) -> None:
        if listed or request.starts_a_save:
            listed.append(request)
        if len(listed) == at and not sees:
            kill()

    def answered(request: Request) -> None:
        if sees and len(listed) >= at:
            kill()

    def kill() -> None:
        proxy.failing = "closed"  # nothing else arrives
        for pid in descendants(process):
            os.kill(pid, signal.SIGKILL)

    proxy.before, proxy.after = count, answered
    process = machine.start(*machine.training("killed", steps))
    status, output = machine.end()
    assert status == -signal.SIGKILL, output
    print(f"killed {'after' if sees else 'before'} request {at}: {listed[at - 1].method} {listed[at - 1].path[:90]}")
    return listed[at - 1], output


@pytest.mark.parametrize("failing", ["503", "closed"])
def test_a_store_that_fails_does_not_end_a_run(server, proxy, tokens, forks, tmp_path, failing):
    machine = Machine(tmp_path / "machine", proxy, tokens, forks)

    began: list[float] = []

    def fail(request: Request) -> None:
        if request.starts_a_save and sum(each.starts_a_save for each in proxy.requests) == 3:
            began.append(time.monotonic())
        proxy.failing = failing if began and time.monotonic() < began[0] + FAILING_S else None

    proxy.before = fail
    output = machine.run(*machine.training(failing, 4))
    assert f"done: runs/s3/{BUCKET}/runs/{failing}" in output
    if failing == "503":  # the SDK itself tries again for longer where a connection is closed
        assert "The run goes on" in output and f"{URL}/{failing} answers again" in output
    assert whole_steps(server, failing, tmp_path / "check") == ({3, 4}, 4)


@pytest.mark.parametrize("failing", ["503", "closed"])
def test_streams_of_a_store_that_fails_are_read_again(server, proxy, tokens, forks, tmp_path, failing):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(4):
        lines = "".join(json.dumps({"text": f"{number} {i} " + "abc" * (i % 7)}) + "\n" for i in range(200))
        (corpus / f"{number}.jsonl").write_text(lines)
        server.write(f"corpus-{failing}/{number}.jsonl", lines.encode())
    machine, began = Machine(tmp_path / "machine", proxy, tokens, forks), list[float]()

    def fail(request: Request) -> None:
        if f"/corpus-{failing}/" in request.path and request.method == "GET":
            began.append(time.monotonic())
            proxy.failing = failing if time.monotonic() < began[0] + FAILING_S else None

    proxy.before = fail
    options = ["--data.tokenizer", "byte", "--data.lanes", "2", "--model.vocab_size", "257"]
    for name, place in (("local", corpus), ("remote", f"s3://{BUCKET}/corpus-{failing}")):
        words = machine.training(name, 3, *options, data=f"jsonl:{place}/*.jsonl", url=str(tmp_path))
        machine.run(*words)
    assert began[-1] > began[0] + FAILING_S
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("local", "remote")]
    assert losses(lines[0]) == losses(lines[1])


def test_what_could_not_be_uploaded_is_uploaded_by_the_next_start(server, proxy, tokens, forks, tmp_path):
    machine = Machine(tmp_path / "machine", proxy, tokens, forks)
    proxy.before = lambda request: setattr(proxy, "failing", "503" if request.method in ("PUT", "POST") else None)
    words = machine.training("late", 3)
    output = machine.run(*words, "--store.final_wait", "2s", status=1)
    assert "step_00000002, step_00000003" in output and "repeat the command on this machine" in output
    assert server.keys("runs/late/checkpoints/") == []
    full = machine.training("late", 5, "--store.spool_gb", "0.001", "--store.final_wait", "1s")
    output = machine.run(*full, status=1)
    assert "store.spool_gb = 0.001 is reached" in output and "wait for s3://bucket/runs/late" in output
    proxy.reset()
    assert "nothing to do" in machine.run(*words)
    steps, latest = whole_steps(server, "late", tmp_path / "check")
    assert {2, 3} <= steps and latest == 3


def test_two_jobs_do_not_overwrite_each_other(server, proxy, tokens, forks, tmp_path):
    second = Forks(python_of("stores"), IMPORTED, {**os.environ, **OURS})
    one, other = Machine(tmp_path / "one", proxy, tokens, forks), Machine(tmp_path / "other", proxy, tokens, second)
    one.run(*one.training("twice", 1))

    def once(request: Request) -> None:  # while one machine uploads a checkpoint, another one publishes its own
        if request.starts_a_save and request.path.startswith(f"/{BUCKET}/runs/twice"):
            proxy.before = lambda request: None
            other.run(*other.training("twice", 2))

    proxy.before = once
    output = one.run(*one.training("twice", 3), status=1)
    assert "checkpoints/latest has been written by another process" in output
    steps, latest = whole_steps(server, "twice", tmp_path / "check")
    assert latest == 2 and 2 in steps


def test_commands_read_a_store(server, proxy, tokens, forks, tmp_path):
    machine = Machine(tmp_path / "machine", proxy, tokens, forks)
    machine.run(*machine.training("read", 2))
    run, step = f"{URL}/read", f"{URL}/read/checkpoints/step_00000001"
    other = Machine(tmp_path / "other", proxy, tokens, forks)
    assert re.findall(r"step_0000000\d .* whole", other.run("checkpoint", "list", run))
    assert "is intact" in other.run("checkpoint", "verify", step)
    other.run("checkpoint", "consolidate", run, "out.safetensors")
    other.run("convert", "export", run, "hf")
    assert other.run("generate", f"{run}/checkpoints/latest", "--prompt", "a", "--tokens", "2", "--tokenizer", "byte")
    # as initial weights, on another layout, and as a checkpoint to resume
    words = other.training("from", 3, "--model.init_from", run, "--nproc", "2", "--tp", "2")
    other.run(*words)
    output = other.run(*other.training("at_1", 2, "--checkpoint.load", step))
    assert "resumed after step 1," in output
    assert (
        losses(server.read("runs/at_1/metrics.jsonl").decode())[2]
        == losses(server.read("runs/read/metrics.jsonl").decode())[2]
    )

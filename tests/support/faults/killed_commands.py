"""SIGKILL at random moments: `python -m tests.support.faults.killed_commands --count 40 --seed 0`.

Each kill takes the launcher, one rank or the whole group of a run on two ranks, or a preparation or an export with its
workers: at the start, in a step, in a save, while it writes. Within ten seconds no process of it is left, and what has
been published is whole: the checkpoint that `latest` names verifies, a token file and an export are absent or complete.
The next kill of the same kind starts where this one ended, so every one also shows that a new start goes on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from megalite.checkpoint import CheckpointError, latest, manifest_of
from megalite.checkpoint.inspect import damages
from megalite.data.indexed import IndexedTokens
from tests.launch.marked import MARK, living
from tests.structure.sources import ROOT
from tests.support.configs import write_tokens
from tests.support.faults import random_cases

WITHIN = 10.0  # seconds until no process is left
TIMEOUT = 240.0  # until a phase is reached
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "max_position_embeddings": 16}
TEXT = "Every café at six: quick brown foxes jump over lazy dogs.\n" * 40_000
KILLS = [  # what is killed, whose process, when
    *(("train", "launcher", when) for when in ("start", "step", "save")),
    *(("train", "rank", when) for when in ("step", "save", "start")),
    *(("train", "group", when) for when in ("save", "start", "step")),
    *((what, "group", "writing") for what in ("prepare", "export") for _ in range(3)),
    *((what, "launcher", "writing") for what in ("prepare", "export") for _ in range(3)),
]
IN_THE_SUITE = [
    ("train", "launcher", "start"),
    ("prepare", "launcher", "writing"),
    ("train", "launcher", "save"),
    ("prepare", "group", "writing"),
    ("train", "rank", "step"),
    ("train", "group", "start"),
    ("export", "launcher", "writing"),
    ("prepare", "launcher", "writing"),
]


class Failed(AssertionError):
    """A kill left a process, or something damaged."""


@dataclass
class Scene:
    """A directory with a run, a token file and an export, all of which are started and killed again and again."""

    directory: Path
    random: random.Random
    train: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        tokens = write_tokens(self.directory, 96)
        options: dict[str, object] = {f"model.{name}": value for name, value in SHAPE.items()}
        options |= {"data.train": tokens, "data.sequence_length": 16, "run.dir": self.directory, "run.name": "run"}
        options |= {
            "train.steps": 100_000,
            "train.global_batch_size": 4,
            "train.micro_batch_size": 2,
            "optimizer.decay": "constant",
        }
        options |= {"checkpoint.interval": 4, "checkpoint.keep": 2, "run.timeout": "60s"}
        self.train = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        for number in range(4):
            (self.directory / f"{number}.txt").write_text(TEXT)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "run" / "checkpoints"

    def words(self, what: str) -> list[str]:
        if what == "train":
            return ["train", "--nproc", "2", "--dp", "2", *self.train]
        if what == "prepare":
            place = ["--output", str(self.directory / "prepared"), "--workers", "2"]
            return ["prepare", "--input", str(self.directory / "*.txt"), "--tokenizer", "byte", *place]
        return ["convert", "export", str(self.checkpoints.parent), str(self.directory / "exported")]

    def start(self, what: str, mark: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK: mark, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
        with (self.directory / "output").open("wb") as output:
            words = [sys.executable, "-m", "megalite", *self.words(what)]
            return subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, cwd=self.directory, start_new_session=True
            )

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")[-3000:]


def kill(scene: Scene, what: str, whom: str, when: str, within: float = WITHIN) -> str:
    """Run one kill and return a line about it. Raises Failed."""
    if what == "export" and latest(scene.checkpoints) is None:
        make_checkpoint(scene)
    mark, before = uuid.uuid4().hex, latest(scene.checkpoints)
    process = scene.start(what, mark)
    phases = {"start": lambda: True, "step": in_step(scene), "save": in_save(scene), "writing": in_writing(scene)}
    longest = {"start": 6.0, "step": 0.5, "save": 0.05, "writing": 1.0 if what == "prepare" else 0.02}[when]
    wait_until(phases[when], process, scene)
    time.sleep(scene.random.uniform(0, longest))
    ended = process.poll() is not None
    for pid in victims_of(scene, process.pid, mark, whom):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with suppress(subprocess.TimeoutExpired):
        process.wait(within)
    while (left := living(mark)) and time.monotonic() < killed + within:
        time.sleep(0.05)
    took = time.monotonic() - killed
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if left:
        raise Failed(f"{what}, {whom}, {when}: {len(left)} processes were left after {within:.0f} s\n{scene.output()}")
    check(scene, before)
    for path in scene.directory.glob(".prepared.*"):  # left by the kill, under a name that no later one takes
        path.unlink()
    shutil.rmtree(scene.directory / ".exported.new", ignore_errors=True)
    return f"{what:8} {whom:9} {when:8} gone after {took:.1f} s{', it had ended' if ended else ''}"


def victims_of(scene: Scene, launcher: int, mark: str, whom: str) -> list[int]:
    """The processes to kill: the launcher, the whole group, or a random rank if there is one yet."""
    if whom == "group":
        return living(mark)
    ranks = ranks_of(mark) if whom == "rank" else []
    return [scene.random.choice(ranks)] if ranks else [launcher]


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[bytes], scene: Scene) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not reached():
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failed(f"a new start did not go on: status {process.poll()}\n{scene.output()}")
        time.sleep(0.005)


def in_step(scene: Scene) -> Callable[[], bool]:
    """Whether a run that is now started has done further steps: it goes on after the newest checkpoint."""
    metrics = scene.directory / "run" / "metrics.jsonl"
    started = time.time()
    return lambda: (
        metrics.exists() and metrics.stat().st_mtime > started + 0.01 and len(metrics.read_text().splitlines()) > 1
    )


def in_save(scene: Scene) -> Callable[[], bool]:
    before = set(scene.checkpoints.glob("step_*"))
    return lambda: any(scene.checkpoints.glob(".step_*.saving")) or bool(set(scene.checkpoints.glob("step_*")) - before)


def in_writing(scene: Scene) -> Callable[[], bool]:
    """Whether a tool has begun to write, under a temporary name, or has already ended."""
    written = ("prepared.idx", "exported")
    temporary = (".prepared.*.bin", ".exported.new")
    return lambda: any(any(scene.directory.glob(name)) for name in (*written, *temporary))


def ranks_of(mark: str) -> list[int]:
    """The processes of ranks."""
    pids = []
    for pid in living(mark):
        with suppress(OSError):
            if b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                pids.append(pid)
    return pids


def make_checkpoint(scene: Scene) -> None:
    """Train a checkpoint to export, if no kill has left one."""
    mark = uuid.uuid4().hex
    process = scene.start("train", mark)
    wait_until(lambda: latest(scene.checkpoints) is not None, process, scene)
    process.terminate()
    process.wait(TIMEOUT)


def check(scene: Scene, before: Path | None) -> None:
    """Raise Failed unless every published file is complete and the previous checkpoint is not lost."""
    newest = latest(scene.checkpoints)
    try:
        if newest is None and before is not None:
            raise Failed(f"{before} is lost")
        damaged = damages(manifest_of(newest)) if newest is not None else []
    except CheckpointError as error:
        raise Failed(f"{newest} is damaged: {error}") from None
    if damaged:
        raise Failed(f"{newest} is damaged: {damaged}")
    prepared, exported = scene.directory / "prepared", scene.directory / "exported"
    if prepared.with_suffix(".idx").exists():
        expected = json.loads(prepared.with_suffix(".json").read_text())["tokens"]
        if sum(IndexedTokens(prepared).sizes) != expected:
            raise Failed(f"{prepared} is not whole")
        for path in scene.directory.glob("prepared.*"):
            path.unlink()  # the next one writes it anew
    if exported.exists():
        if not (exported / "config.json").exists() or not list(exported.glob("*.safetensors")):
            raise Failed(f"{exported} is not whole: {sorted(exported.iterdir())}")
        for path in exported.iterdir():
            path.unlink()
        exported.rmdir()


def main() -> None:
    options = random_cases.arguments(__doc__, 40)
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="megalite_kills_") as directory:
        scene = Scene(Path(directory), chosen)
        cases = islice(cycle(chosen.sample(KILLS, len(KILLS))), options.count)
        random_cases.run((partial(kill, scene, *case) for case in cases), "kills left nothing behind and lost nothing")


if __name__ == "__main__":
    main()

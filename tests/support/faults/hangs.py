"""Runs of two ranks, a pipeline, in which rank 1 does not do its part: what each rank has left is explained while it
hangs.

In the first three cases rank 1 goes on when the hang has been explained, and the run continues to the next one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

from megalite.system.activity import READING
from megalite.training.hang import Explanation, explain, load
from tests.support.configs import case_of, config_of, write_tokens

WORLD, VICTIM = 2, 1
WITHIN = 240.0  # seconds: far more than a loaded machine needs
TOKENS = 64
CASES = {"computation": 2, "loader": 4, "save": 5, "skipped": 7}  # in one run, each with the step in which rank 1 hangs
PLANS = {"plans": 1}
CASE = case_of(tied=False, kv_heads=2, vocab_size=TOKENS, layers=2, masked=False, dropout=0.0, pp=2, microbatches=4)


class Until:
    """Holds rank 1 in a case until it was explained."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __call__(self, case: str) -> None:
        while not (self.directory / f"{case}.explained").exists():
            Event().wait(0.05)


def train(cases: dict[str, int], rank: int, port: int, prefix: str, directory: Path) -> None:
    """One rank's process."""
    log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch
    import torch.distributed as dist

    from megalite.assembly import parts as build
    from megalite.config.load import from_dict
    from megalite.launch import peers
    from megalite.training.fit import fit
    from megalite.training.trainer import Trainer
    from megalite.training.watchdog import Watchdog

    torch.set_num_threads(1)
    peers.BEAT_S = 0.2
    limit = timedelta(seconds=WITHIN)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    config = from_dict(config_of(CASE, prefix, run={"dir": str(directory), "name": "run", "timeout": f"{WITHIN:g}s"}))
    config.train.steps, config.train.watchdog = 1000, "1s"
    config.checkpoint.interval, config.checkpoint.async_save = CASES["save"], False
    trainer = Trainer(config, build.make_mesh(config))
    if rank == VICTIM:
        hang(trainer, cases, Until(directory))
    with Watchdog(config, trainer.mesh, trainer.run_dir):
        fit(trainer)


def hang(trainer: Any, cases: dict[str, int], until: Until) -> None:
    """Let this rank hang in every case."""
    from megalite.assembly import parts as build
    from megalite.checkpoint import tensors
    from megalite.optimizer import norm
    from megalite.parallel.collectives import Pending

    activity, all_reduce, append = trainer.mesh.activity, norm.all_reduce, tensors.append_chunk
    if "plans" in cases:  # one microbatch less than rank 0 has
        step = trainer.loader.step
        trainer.schedule = build.schedule(trainer.config, CASE["microbatches"] - 1)
        trainer.loader.step = lambda first: step(first)[:-1]
        return

    class Data:
        """The data, which stops at a batch."""

        def __getattr__(self, name: str) -> Any:
            return getattr(trainer.train_data, name)

        def __getitem__(self, index: int) -> Any:
            if index // trainer.config.train.global_batch_size == cases["loader"] - 1:
                until("loader")
            return trainer.train_data[index]

    def computing(place: Any) -> None:
        if (activity.step, str(place)) == (cases["computation"], "B1.1") and not activity.waiting:
            until("computation")

    def writing(*args: Any) -> Any:
        until("save")
        return append(*args)

    def summing(x: Any, axis: Any) -> Any:
        return Pending([], lambda: x) if activity.step == cases["skipped"] else all_reduce(x, axis)

    trainer.loader._dataset = Data()
    activity.listeners += (computing,)
    patch.object(tensors, "append_chunk", writing).start()
    patch.object(norm, "all_reduce", summing).start()


def explained(cases: dict[str, int], directory: Path) -> Iterator[tuple[str, Explanation]]:
    """Run a list of cases; the explanation of each while it hangs."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    prefix = write_tokens(directory, TOKENS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=train, args=(cases, rank, store.port, prefix, directory), daemon=True)
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    try:
        for case, step in cases.items():
            wait_for(lambda: hangs(directory / "run", case, step), directory)  # noqa: B023 (it is called at once)
            yield case, explain(load(directory / "run"))
            (directory / f"{case}.explained").touch()
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid or 0, signal.SIGKILL)
            rank.join()


def hangs(run: Path, case: str, step: int) -> bool:
    """Whether both ranks have left a record of a case: rank 0 waits, and rank 1 is where it hangs."""
    sections = []
    for rank in range(WORLD):
        with suppress(OSError, ValueError):
            sections.append(json.loads((run / "stalls" / f"rank_{rank:05d}.json").read_text()))
    if len(sections) < WORLD or any(each.get("past") for each in sections):
        return False
    first, second = (each["place"] for each in sections)
    action = {"computation": "B1.1", "loader": READING, "save": "saving"}.get(case, second["action"])
    stays = bool(second.get("waits")) == (case in ("skipped", "plans"))
    return bool(first.get("waits")) and first["step"] == step and second["action"] == action and stays


def wait_for(condition: Callable[[], bool], directory: Path) -> None:
    deadline = time.monotonic() + WITHIN
    while not condition():
        logs = {path.name: path.read_text(errors="replace")[-3000:] for path in directory.glob("*.log")}
        assert time.monotonic() < deadline, logs
        time.sleep(0.05)

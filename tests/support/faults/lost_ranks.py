"""Ranks that are lost at random actions: `python -m tests.support.faults.lost_ranks --count 50 --seed 0`.

Each case trains on three ranks; one of them kills or stops itself, or waits forever, as it begins an action. Every
other rank must end with status 1 and name that rank, and whether its process has ended, is stopped, or is alive. The
rank may hold the store, and communication with a lost rank may raise nothing, as on a GPU (`silent`: a failed wait
never returns).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from time import process_time
from typing import Any

from megalite.system.activity import Activity
from tests.support.configs import case_of, config_of, write_tokens
from tests.support.faults import random_cases
from tests.support.pool import start_fork_server

WORLD = 3
WITHIN = 240.0  # seconds: far more than a loaded machine needs
LAYOUTS = {"dp": {"dp": 3, "zero": 2, "microbatches": 2}, "pp": {"pp": 3, "layers": 3, "microbatches": 4}}
TOKENS = 64
FAST = {"BEAT_S": 0.2, "SILENT_S": 1.0, "ANSWER_S": 2.0}  # of launch.peers
STOPPED_FOR = "3s"  # what run.timeout is to the watchdog; gloo's own is WITHIN
STATES = {
    "SIGKILL": "its process has ended",
    "SIGSTOP": "its process exists but does not respond",
    "hang": "it is alive but makes no progress",
}


@dataclass(frozen=True)
class Loss:
    """The rank that is lost, how, and at which action. `held`: rank 0 holds the store, as without torchrun."""

    layout: str
    victim: int
    how: str  # SIGKILL, SIGSTOP or hang
    action: int
    held: bool
    silent: bool

    def __str__(self) -> str:
        text = f"{self.layout}: rank {self.victim}, {self.how} at its action {self.action}"
        text += ", rank 0 holds the store" if self.held else ""
        return text + (", nothing is raised" if self.silent else "")


def drawn(count: int, seed: int) -> list[Loss]:
    """Random losses: each kind occurs, the store's holder among the victims."""
    draw, losses = random.Random(seed), []
    for number in range(count):
        held = number % 2 == 0
        victim = 0 if held and number % 4 == 0 else draw.randrange(WORLD)
        how, layout = ("SIGKILL", "SIGSTOP", "hang")[number // 2 % 3], draw.choice(list(LAYOUTS))
        losses.append(Loss(layout, victim, how, draw.randint(1, 60), held, draw.random() < 0.5))
    return losses


def train(loss: Loss, rank: int, port: int, prefix: str, directory: str) -> None:
    """One rank's process."""
    log = os.open(f"{directory}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(not loss.held)
    import torch
    import torch.distributed as dist

    from megalite.assembly import parts as build
    from megalite.config.load import from_dict
    from megalite.launch import peers, process
    from megalite.parallel import collectives
    from megalite.training import watchdog
    from megalite.training.fit import fit
    from megalite.training.trainer import Trainer

    torch.set_num_threads(1)
    for name, value in FAST.items():
        setattr(peers, name, value)
    watchdog.END_S = process.GRACE = 2.0  # ranks share two cores with other tests
    if loss.how == "hang":
        watchdog.MARGIN_S = 1.0  # otherwise unchanged: a stopped rank must be recognized by its silence
    if loss.silent:
        collectives.Work.wait = never_failing(collectives)  # type: ignore[method-assign]
    limit = timedelta(seconds=WITHIN)
    store = dist.TCPStore("127.0.0.1", port, is_master=loss.held and rank == 0, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    model = case_of(tied=False, kv_heads=2, vocab_size=TOKENS, layers=2, masked=False, dropout=0.0)
    case = model | LAYOUTS[loss.layout]
    config = from_dict(config_of(case, prefix, run={"dir": directory, "name": "run", "timeout": f"{WITHIN:g}s"}))
    config.train.steps = 100_000
    trainer = Trainer(config, build.make_mesh(config))
    config.run.timeout = STOPPED_FOR
    if rank == loss.victim:
        trainer.mesh.activity.listeners += (Losing(loss, trainer.mesh.activity),)
    try:
        with watchdog.Watchdog(config, trainer.mesh, trainer.run_dir):
            fit(trainer)
    except collectives.CommunicationError as error:
        process.exit_after_failure(error)


class Losing:
    """A listener to the rank's actions that ends or stops it as one begins."""

    def __init__(self, loss: Loss, activity: Activity):
        self.loss, self.left, self.activity = loss, loss.action, activity

    def __call__(self, place: Any) -> None:
        self.left -= 1
        if self.loss.how == "hang" and self.activity.waiting:
            return  # the record would name another rank as awaited
        if self.left <= 0:
            print(f"begins {place} after {process_time():.2f} s of CPU", flush=True)
            Event().wait() if self.loss.how == "hang" else os.kill(os.getpid(), getattr(signal, self.loss.how))


def never_failing(collectives: Any) -> Any:
    """Work.wait as on NCCL, where a lost peer raises nothing: it does not return."""
    wait = collectives.Work.wait

    def waits(work: Any) -> None:
        try:
            wait(work)
        except collectives.CommunicationError:
            Event().wait()

    return waits


def lose(loss: Loss, prefix: str, directory: Path) -> str:
    """One case. Returns a line about it; raises AssertionError."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = free_port() if loss.held else store.port
    context = multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=train, args=(loss, rank, port, prefix, str(directory)), daemon=True)
        for rank in range(WORLD)
    ]
    for rank in ranks:
        rank.start()
    alive = [rank for number, rank in enumerate(ranks) if number != loss.victim]
    began = time.monotonic()
    log = directory / f"{loss.victim}.log"
    try:
        while not (log.exists() and "begins" in log.read_text()) and time.monotonic() < began + WITHIN:
            time.sleep(0.02)
        lost = time.monotonic()
        for rank in alive:
            rank.join(max(0.0, began + WITHIN - time.monotonic()))
        took = time.monotonic() - lost
        logs = {number: (directory / f"{number}.log").read_text(errors="replace") for number in range(WORLD)}
        assert [rank.exitcode for rank in alive] == [1, 1], (
            f"{loss}: statuses {[rank.exitcode for rank in ranks]}\n{logs}"
        )
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid or 0, signal.SIGKILL)
            rank.join()
    for number in set(range(WORLD)) - {loss.victim}:
        named = re.findall(r"rank (\d) (?:was lost first|is stuck): ([^:;]*)", logs[number])
        assert named and set(named) == {(str(loss.victim), STATES[loss.how])}, (
            f"{loss}: rank {number} names {named}\n{logs}"
        )
    return f"{loss}: named after {took:.1f} s"


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    options = random_cases.arguments(__doc__, 50)
    start_fork_server()
    with tempfile.TemporaryDirectory(prefix="megalite_peers_") as name:
        prefix = write_tokens(Path(name), TOKENS)

        def attempt(number: int, loss: Loss) -> str:
            (directory := Path(name, str(number))).mkdir()
            return lose(loss, prefix, directory)

        losses = enumerate(drawn(options.count, options.seed))
        random_cases.run((partial(attempt, *each) for each in losses), "lost ranks were named by all others")


if __name__ == "__main__":
    main()

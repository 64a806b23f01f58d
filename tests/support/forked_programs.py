"""Runs Python programs in processes forked from one that has imported torch: a start takes 0.1 s instead of 2 s.

For tests of a program's results and files. Tests of start, signals, imports or end of a process start real ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 300


class Program(NamedTuple):
    """A process to fork: program and arguments, directory, environment, and the file of its output."""

    words: list[str]
    cwd: str
    environment: dict[str, str]
    output: str


class Imported:
    """A process with further modules imported, from which programs are forked: slow packages are imported once."""

    def __init__(self, modules: Sequence[str]):
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, list(modules)))
        self._process.start()
        theirs.close()

    def run(self, programs: list[Program]) -> bool:
        self._pipe.send(programs)
        succeeded: bool = self._pipe.recv()
        return succeeded

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: connection.Connection, modules: list[str]) -> None:
    for module in modules:
        import_module(module)
    while True:
        try:
            programs = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_run_all(programs, multiprocessing.get_context("fork")))


def run(
    words: Sequence[str],
    ranks: int = 1,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    imported: Imported | None = None,
) -> tuple[bool, str]:
    """Run `python WORDS …` on `ranks` processes with the variables that torchrun sets. Returns whether all succeeded,
    and their output.

    Args:
        words: the path of a script, or -m and a module, and its arguments.
        environment: variables beside those of this process.
        imported: the process to fork from; default: the one that has imported torch.
    """
    variables, store = {**os.environ, **(environment or {})}, None
    if ranks > 1:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent serves it
        variables |= {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        programs = []
        for rank in range(ranks):
            own = variables | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            programs.append(Program(list(words), str(cwd or Path.cwd()), own, output.name))
        succeeded = (
            imported.run(programs) if imported else _run_all(programs, multiprocessing.get_context("forkserver"))
        )
        return succeeded, output.read()


def _run_all(programs: list[Program], context: BaseContext) -> bool:
    """Fork programs. Returns whether all have succeeded in time; once one has failed, the others are killed."""
    processes = [context.Process(target=_run, args=program, daemon=True) for program in programs]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    while (
        left := [process.sentinel for process in processes if process.exitcode is None]
    ) and time.monotonic() < deadline:
        connection.wait(left, deadline - time.monotonic())
        if any(process.exitcode for process in processes):
            break  # the others may wait for it
    for program, process in zip(programs, processes, strict=True):
        ended = "killed" if process.exitcode is None else f"exit code {process.exitcode}"
        process.kill()
        process.join()
        if ended != "exit code 0":
            with open(program.output, "a") as output:
                output.write(f"{process.name} (process {process.pid}): {ended}\n")
    return all(process.exitcode == 0 for process in processes)


def _run(words: list[str], cwd: str, environment: dict[str, str], output: str) -> None:
    gc.freeze()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

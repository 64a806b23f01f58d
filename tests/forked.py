"""Runs Python programs in processes forked from the one that has imported torch: a start costs a tenth of a second, and otherwise two.

For tests of what a program computes and writes. Tests of how processes start, get signals, import or end start real ones.
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
from multiprocessing import connection
from pathlib import Path

LIMIT_S = 300


def run(words: Sequence[str], ranks: int = 1, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Run `python WORDS …` on `ranks` processes with the variables that torchrun sets. Returns whether all succeeded, and their output.

    Args:
        words: the path of a script, or -m and a module, and its arguments.
        environment: variables beside those of this process.
    """
    variables, store = {**os.environ, **(environment or {})}, None
    if ranks > 1:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent serves it
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    context = multiprocessing.get_context("forkserver")
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        processes = []
        for rank in range(ranks):
            own = variables | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})
            processes.append(context.Process(target=_run, args=(list(words), str(cwd or Path.cwd()), own, output.name), daemon=True))
            processes[-1].start()
        deadline = time.monotonic() + LIMIT_S
        while (left := [process.sentinel for process in processes if process.exitcode is None]) and time.monotonic() < deadline:
            connection.wait(left, deadline - time.monotonic())
            if any(process.exitcode for process in processes):
                break  # the others may wait for it
        for process in processes:
            process.kill()
            process.join()
        return all(process.exitcode == 0 for process in processes), output.read()


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

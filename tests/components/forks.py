"""Programs of another interpreter, forked from a process of it that has imported what takes long.

`python forks.py MODULE …` reads one JSON object a line, forks a process that runs the program in it, and writes its
process id, and its exit status when it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


class Forks:
    """A process that has imported modules, and starts programs one at a time.

    Args:
        python: the interpreter.
    """

    def __init__(self, python: Path, modules: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(
            [python, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, words: Sequence[str], cwd: Path, environment: dict[str, str], output: Path) -> int:
        """Start `python -m WORDS …`, whose output goes to a file. Returns its process id."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"words": list(words), "cwd": str(cwd), "environment": environment, "output": str(output)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def wait(self) -> int:
        """The exit status of the program, negative for a signal."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _serve(modules: Sequence[str]) -> None:
    for module in modules:
        import_module(module)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            _run(**order)
        print(child, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(words: list[str], cwd: str, environment: dict[str, str], output: str) -> None:
    status = 1
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1:])

"""Runs a module in a process that a launcher has started: `python -m megalite.launch.rank MODULE [ARGUMENT
…]`.

It ends with the launcher, from its first import on, and prints nothing at a signal: the launcher does.
"""

from __future__ import annotations

import runpy
import sys

from megalite.launch import signals
from megalite.launch.output import outlive_readers
from megalite.system import processes

if __name__ == "__main__":
    outlive_readers()
    signals.end_on_signal(quiet=True)
    processes.watch()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

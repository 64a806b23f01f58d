"""The commands by name, and how one of them starts and ends. Only the chosen command is imported."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "doctor": "check this machine: versions, GPUs, communication, limits, disk, and what is missing",
    "init": "write a configuration for this machine",
    "train": "train a model, on one process or on many",
    "launch": "print or submit a job for SLURM, Kubernetes, Ray or SkyPilot",
    "plan": "search for the best parallel layout: memory, step time, throughput",
    "bubble": "simulate a pipeline schedule: bubble, memory, messages, timeline",
    "prepare": "tokenize texts or conversations into a token file",
    "data": "inspect a token file: counts, lengths, duplicates, samples with their loss mask",
    "convert": "import, export and check Hugging Face models",
    "generate": "generate text or chat with a trained model",
    "evaluate": "compute perplexity, or run tasks of lm-evaluation-harness",
    "score": "ask a model once for what later runs need: as a reference or a teacher",
    "verify": "compare a layout with one process, step by step",
    "benchmark": "benchmark this machine (source checkout only)",
    "first-light": "test and benchmark the GPUs of a machine in one run (source checkout only)",
    "checkpoint": "list, inspect, verify, compare and consolidate checkpoints",
    "report": "write an HTML report of one or more runs, or serve a live one during training",
    "compare": "compare runs: final figures, differing options, curves",
    "explain": "explain a hang: the rank that caused it, and the ranks that waited for it",
    "timeline": "compare the recorded steps of a run with the simulator",
    "import-config": "translate another project's configuration",
    "completion": "print a shell completion script",
    "demo": "prepare data and train a small model in minutes (source checkout only)",
}
NEW_OBJECTS = 100_000
"""Between collections of garbage. With Python's 700, importing torch and megalite collects 400 times and
finds nothing."""
# their output may be piped to head, which closes the pipe early
PRINTS_TABLES = ("plan", "bubble", "compare")


def start(name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its status.

    Args:
        name: a key of COMMANDS.
        arguments: the command's arguments; None for those of this process, whose program name is then kept.
    """
    prepare_process(name)
    if arguments is not None:
        sys.argv = [f"megalite {name}", *arguments]
    if name in PRINTS_TABLES:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if name == "bubble":
        # up to millions of small objects without reference cycles: searching them for cycles would take half
        # of the time
        gc.disable()
    main: Callable[[], int | None] = import_module(f"megalite.commands.{name.replace('-', '_')}").main
    end(name, (main() if name == "train" or _is_rank() else interruptible(main)) or 0)


def prepare_process(name: str) -> None:
    """Set up a process before its imports, when the launcher may be killed or Ctrl-C pressed."""
    # until there is a handler: Python's own one prints a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(NEW_OBJECTS)
    from megalite.launch import signals
    from megalite.launch.output import outlive_readers
    from megalite.system import processes

    if name == "train":
        signals.end_training_on_signal(" before the first step; nothing was changed")
    else:
        signals.end_on_signal(quiet=_is_rank())  # the process that started the ranks says what has happened
    if name == "train" or not _is_rank():
        signals.unblock()
    processes.watch()
    outlive_readers()


def _is_rank() -> bool:
    return "RANK" in os.environ


def interruptible(main: Callable[[], int | None]) -> int | None:
    """Run a command; a signal raises in it, so that it removes what is half-written, and ends it with one
    line."""
    from megalite.launch import signals
    from megalite.launch.exit_status import signal_status

    with signals.raise_on_signal() as arrived:
        try:
            return main()
        except BaseException:  # an import, or code in C, may have turned the interrupt into any error
            if not arrived:
                raise
            print(signals.signal_message(arrived[0]), file=sys.stderr, flush=True)
            return signal_status(arrived[0])


def end(name: str, status: int) -> NoReturn:
    """End the process, together with the other ranks unless this one has failed."""
    distributed = sys.modules.get("torch.distributed")
    if name != "train" and not (distributed and distributed.is_available() and distributed.is_initialized()):
        sys.exit(status)
    if status:
        from megalite.system.messages import flush_output

        flush_output()
        os._exit(status)  # a regular exit would wait for the other ranks
    from megalite.launch.process import shutdown

    shutdown()

"""The commands by name, and how one of them starts and ends. Only the chosen command is imported."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "train": "train a model, on one process or under torchrun",
    "plan": "choose a layout for a number of GPUs: memory, step time, throughput",
    "bubble": "cost of a pipeline schedule: bubble, memory, messages, timeline",
    "prepare": "turn text or conversations into a token file",
    "data": "look into a token file: counts, lengths, duplicates, samples with what counts in the loss",
    "convert": "import, export and check Hugging Face models",
    "generate": "continue texts, or chat, with a trained model",
    "evaluate": "compute perplexity, or run tasks of lm-evaluation-harness",
    "verify": "compare a layout with one process, step by step",
    "benchmark": "measure this machine (in a checkout only)",
    "checkpoint": "list, inspect, verify, compare and consolidate checkpoints",
    "report": "write an HTML page about one run or several",
    "timeline": "compare the recorded steps of a run with the simulator's",
    "import-config": "translate a DeepSpeed or Accelerate configuration",
    "demo": "prepare data and train a small model in minutes (in a checkout only)",
}
PRINTS_TABLES = ("plan", "bubble")  # their output may be piped to head, which closes the pipe early


def start(name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its status.

    Args:
        name: a key of COMMANDS.
        arguments: the command's arguments; None for those of this process, whose program name is then kept.
    """
    if arguments is not None:
        sys.argv = [f"megalite {name}", *arguments]
    if name in PRINTS_TABLES:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if name == "bubble":
        gc.disable()  # up to millions of small objects without reference cycles: searching them for cycles would take half of the time
    status: int = import_module(f"megalite.commands.{name.replace('-', '_')}").main() or 0
    distributed = sys.modules.get("torch.distributed")
    if name != "train" and not (distributed and distributed.is_available() and distributed.is_initialized()):
        sys.exit(status)
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a regular exit would wait for the other ranks
    from megalite.launch.process import shutdown

    shutdown()

"""The commands by name, and how one of them starts and ends. Imports the chosen command alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

COMMANDS = {
    "train": "train a model, on one process or under torchrun",
    "plan": "choose a layout for a number of GPUs: memory, step time, throughput",
    "bubble": "what a pipeline schedule costs: bubble, memory, messages, timeline",
    "prepare": "turn text or conversations into a token file",
    "convert": "import, export and check Hugging Face models",
    "generate": "continue texts, or chat, with a trained model",
    "evaluate": "perplexity, and the tasks of lm-evaluation-harness",
    "verify": "compare a layout with one process, step by step",
    "benchmark": "measure this machine (in a checkout only)",
    "checkpoint": "list, inspect, verify, compare and consolidate checkpoints",
    "report": "one HTML page about one run or several",
    "timeline": "the recorded steps of a run beside the simulator's",
    "import-config": "translate a DeepSpeed or Accelerate configuration",
    "demo": "from nothing to a trained model in minutes (in a checkout only)",
}
PRINTS_TABLES = ("plan", "bubble")  # their output may go to head, which closes the pipe early


def start(name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its status.

    Args:
        name: a key of COMMANDS.
        arguments: of the command; None takes those of this process, under the name that it was started with.
    """
    if arguments is not None:
        sys.argv = [f"megalite {name}", *arguments]
    if name in PRINTS_TABLES:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    status: int = import_module(f"megalite.commands.{name.replace('-', '_')}").main() or 0
    distributed = sys.modules.get("torch.distributed")
    if name != "train" and not (distributed and distributed.is_available() and distributed.is_initialized()):
        sys.exit(status)
    if status:
        os._exit(status)  # tearing communication down would wait for the other ranks
    from megalite.launch.process import shutdown

    shutdown()

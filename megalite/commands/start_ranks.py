"""The options of `megalite train` that start the ranks: `--nproc N`, and on several nodes `--nnodes M
--rdzv_endpoint HOST:PORT`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.commands.parser import Parser, positive
from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.arguments import LAUNCH
from megalite.config.load import load_config
from megalite.system.messages import say

if TYPE_CHECKING:
    from megalite.config.schema import Config
    from megalite.launch.causes import End


def wanted(words: Sequence[str]) -> bool:
    """Return whether a command line asks to start ranks."""
    return any(word.partition("=")[0] in {f"--{name}" for name in LAUNCH} for word in words)


def main(words: Sequence[str]) -> int:
    """Check the configuration, start the ranks of this machine, and wait for their end. Returns the exit
    status of the run."""
    tool = parser()
    options, rest = tool.parse_known_args(words)
    check(tool, options)
    ranks = gpu_count(tool) if options.nproc == "gpu" else int(options.nproc)
    # a wrong option is one message, before torch is imported; advice comes from local rank 0
    config = load_config(rest, world_size=ranks * options.nnodes, advise=False)
    # importing torch, here and in the ranks, takes seconds to a minute
    say(f"starting {ranks} rank{'s' * (ranks > 1)} …")
    from megalite import checkpoint
    from megalite.launch.agent import Launch, launch

    settings = Launch(
        ranks=ranks,
        nodes=options.nnodes,
        node_rank=options.node_rank,
        endpoint=options.rdzv_endpoint,
        restarts=options.max_restarts,
        patience_s=duration_seconds(config.run.timeout) or 0.0,
        newest=lambda: checkpoint.latest(config.run.directory / run_files.CHECKPOINTS),
        crashed=partial(report_failure, config),
    )
    return launch(settings, ["-m", "megalite", "train", *rest])


def report_failure(config: Config, ends: Sequence[End], reason: str, *, since: float, logs: Path) -> None:
    """Leave how the ranks of this node have ended in crash.md and, where it is known best, in summary.json.
    See `Launch.crashed`."""
    from megalite.launch import crash
    from megalite.launch.causes import ExitCause
    from megalite.launch.exit_status import shell_status
    from megalite.launch.output import job_of
    from megalite.training import summary

    first = crash.launcher_failed(config, ends, reason, since=since, logs=logs)
    ours = {end.rank for end in ends if end.kind < ExitCause.LOST}
    # a rank that has written its part does not know its status
    status = next((end.status for end in ends if end.rank == first.rank and end.status), first.status)
    # the cause is on this node, or the rank that writes summary.json
    if first.rank in ours or 0 in (end.rank for end in ends):
        crash.best_effort(
            lambda: summary.launcher_failed(config, shell_status(status), first.reason, since, job_of(logs))
        )


def parser() -> Parser:
    """`megalite train --help` describes the options, from `LAUNCH`."""
    tool = Parser(prog="megalite train", description=__doc__, add_help=False, allow_abbrev=False)
    add = tool.add_argument
    add("--nproc", type=number_of_ranks)
    add("--nnodes", type=positive, default=1)
    add("--node_rank", type=int)
    add("--rdzv_endpoint")
    add("--max_restarts", type=int, default=0)
    return tool


def number_of_ranks(text: str) -> str:
    if text != "gpu":
        positive(text)
    return text


def check(tool: Parser, options: argparse.Namespace) -> None:
    """Exit with status 2 and one message if the options are inconsistent."""
    if "RANK" in os.environ:
        tool.error(
            "--nproc cannot be used under torchrun, which has already started the ranks. Remove --nproc."
        )
    if options.nproc is None:
        tool.error(
            "--nnodes, --node_rank, --rdzv_endpoint and --max_restarts require --nproc. Add --nproc N or "
            "remove them."
        )
    if options.max_restarts < 0:
        tool.error(f"--max_restarts must be non-negative, got {options.max_restarts}.")
    host, _, port = (options.rdzv_endpoint or "").rpartition(":")
    if options.nnodes > 1 and not (host and port.isdecimal()):
        tool.error(
            f"--nnodes {options.nnodes} requires --rdzv_endpoint HOST:PORT, got "
            f"{options.rdzv_endpoint or 'none'}."
        )
    if options.nnodes == 1 and (options.rdzv_endpoint is not None or options.node_rank is not None):
        tool.error(
            "--rdzv_endpoint and --node_rank require more than one node. Add --nnodes M or remove them."
        )
    # the store of fixed places keeps the entries of ended ranks
    if options.node_rank is not None and options.max_restarts:
        tool.error("--max_restarts is not supported with --node_rank. Remove one of them.")
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes:
        tool.error(
            f"--node_rank must be between 0 and {options.nnodes - 1} for --nnodes {options.nnodes}, got "
            f"{options.node_rank}."
        )


def gpu_count(tool: Parser) -> int:
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        tool.error("--nproc gpu requires a GPU, but this machine has none. Pass the number of ranks instead.")
    return count

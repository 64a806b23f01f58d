"""The options of `megalite train` that start the ranks: `--nproc N`, and on several nodes `--nnodes M
--rdzv_endpoint HOST:PORT`. Either number may be MIN:MAX: ranks may then be lost and return."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from megalite.commands.parser import Parser, positive
from megalite.config import run_files
from megalite.config.amounts import duration_seconds
from megalite.config.arguments import LAUNCH
from megalite.config.errors import ConfigError
from megalite.config.load import exit_with, load_config
from megalite.system.messages import say

if TYPE_CHECKING:
    from megalite.config.schema import Config
    from megalite.launch.causes import End


RETURN_AFTER = "30s"


@dataclass(frozen=True)
class Between:
    """A number that may change between two others: N, or MIN:MAX."""

    fewest: int
    most: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse an option. Raises ArgumentTypeError."""
        first, colon, last = text.partition(":")
        fewest = positive(first)
        most = positive(last) if colon else fewest
        if fewest > most:
            raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX, because {fewest} exceeds {most}")
        return cls(fewest, most)

    @property
    def fixed(self) -> bool:
        return self.fewest == self.most

    def __str__(self) -> str:
        return str(self.most) if self.fixed else f"{self.fewest}:{self.most}"


def wanted(words: Sequence[str]) -> bool:
    """Return whether a command line asks to start ranks."""
    return any(word.partition("=")[0] in {f"--{name}" for name in LAUNCH} for word in words)


def main(words: Sequence[str]) -> int:
    """Check the configuration, start the ranks of this machine, and wait for their end. Returns the exit
    status of the run."""
    tool = parser()
    options, rest = tool.parse_known_args(words)
    check(tool, options)
    if options.nproc == "gpu":
        options.nproc = Between(*[gpu_count(tool)] * 2)
    ranks, nodes = options.nproc, options.nnodes
    # a wrong option is one message, before torch is imported; advice comes from local rank 0
    config = load_config(rest, world_size=ranks.most * nodes.most, advise=False)
    used = dict[int, int]()
    if not (ranks.fixed and nodes.fixed):
        used = plan_layouts(config, ranks, nodes)
        rest = [
            *rest,
            f"--parallel.min_ranks={config.parallel.min_ranks}",
            f"--parallel.dp={config.parallel.dp}",
        ]
    # importing torch, here and in the ranks, takes seconds to a minute
    say(f"starting {ranks.most} rank{'s' * (ranks.most > 1)} …")
    from megalite import checkpoint
    from megalite.checkpoint.kept_copies import newest_published, save_newest
    from megalite.launch.agent import Launch, launch

    checkpoints = config.run.directory / run_files.CHECKPOINTS
    settings = Launch(
        ranks=ranks.most,
        nodes=nodes.most,
        node_rank=options.node_rank,
        endpoint=options.rdzv_endpoint,
        restarts=options.max_restarts,
        patience_s=duration_seconds(config.run.timeout) or 0.0,
        fewest=None if ranks.fixed else ranks.fewest,
        fewest_nodes=None if nodes.fixed else nodes.fewest,
        used=lambda count: used.get(count, count),
        return_after_s=duration_seconds(options.return_after) or 0.0,
        newest=lambda: checkpoint.latest(checkpoints),
        save_copies=partial(save_newest, checkpoints=checkpoints, before=newest_published(checkpoints)),
        crashed=partial(report_failure, config),
    )
    return launch(settings, ["-m", "megalite", "train", *rest])


def plan_layouts(config: Config, ranks: Between, nodes: Between) -> dict[int, int]:
    """Print the layout of every number of ranks that a run may have. Sets parallel.min_ranks.

    Exits with status 2 if a number has none. Returns the number of ranks that each uses.
    """
    from megalite.config.elastic import layouts, ranks_of, table
    from megalite.config.rules import check

    fewest, most = ranks.fewest * nodes.fewest, ranks.most * nodes.most
    config.parallel.min_ranks = fewest
    try:
        check(config, most)
        # with a fixed number of ranks on a node, they come and go together
        by_size = layouts(config, range(most, fewest - 1, -ranks.most if ranks.fixed else -1))
    except ConfigError as error:
        exit_with(str(error))
    print("\n".join(table(by_size)), flush=True)
    return {size: ranks_of(layout) for size, layout in by_size.items()}


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
    add("--nnodes", type=Between.read, default=Between(1, 1))
    add("--node_rank", type=int)
    add("--rdzv_endpoint")
    add("--max_restarts", type=int, default=0)
    add("--return_after", default=RETURN_AFTER)
    return tool


def number_of_ranks(text: str) -> Between | str:
    return text if text == "gpu" else Between.read(text)


def check(tool: Parser, options: argparse.Namespace) -> None:
    """Exit with status 2 and one message if the options are inconsistent."""
    if "RANK" in os.environ:
        tool.error(
            "--nproc cannot be used under torchrun, which has already started the ranks. Remove --nproc."
        )
    if options.nproc is None:
        tool.error(
            "--nnodes, --node_rank, --rdzv_endpoint, --max_restarts and --return_after require --nproc. Add "
            "--nproc N or remove them."
        )
    if options.max_restarts < 0:
        tool.error(f"--max_restarts must be non-negative, got {options.max_restarts}.")
    if not duration_seconds(options.return_after):
        tool.error(f"--return_after {options.return_after} is not a duration. Use for example 30s or 10m.")
    check_nodes(tool, options)


def check_nodes(tool: Parser, options: argparse.Namespace) -> None:
    """Exit with status 2 and one message if the options of several nodes are inconsistent."""
    host, _, port = (options.rdzv_endpoint or "").rpartition(":")
    if options.nnodes.most > 1 and not (host and port.isdecimal()):
        tool.error(
            f"--nnodes {options.nnodes} requires --rdzv_endpoint HOST:PORT, got "
            f"{options.rdzv_endpoint or 'none'}."
        )
    if options.nnodes.most == 1 and (options.rdzv_endpoint is not None or options.node_rank is not None):
        tool.error(
            "--rdzv_endpoint and --node_rank require more than one node. Add --nnodes M or remove them."
        )
    for name, number in (("nnodes", options.nnodes), ("nproc", options.nproc)):
        if options.node_rank is not None and isinstance(number, Between) and not number.fixed:
            tool.error(
                f"--node_rank is not supported with --{name} {number}, because nodes are numbered as they "
                "arrive. Remove it."
            )
    # the store of fixed places keeps the entries of ended ranks
    if options.node_rank is not None and options.max_restarts:
        tool.error("--max_restarts is not supported with --node_rank. Remove one of them.")
    if options.node_rank is not None and not 0 <= options.node_rank < options.nnodes.most:
        tool.error(
            f"--node_rank must be between 0 and {options.nnodes.most - 1} for --nnodes {options.nnodes}, got "
            f"{options.node_rank}."
        )


def gpu_count(tool: Parser) -> int:
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        tool.error("--nproc gpu requires a GPU, but this machine has none. Pass the number of ranks instead.")
    return count

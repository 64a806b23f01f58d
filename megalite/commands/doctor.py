"""Check this machine: what training needs, what makes it slow, what is missing and how to get it.

    megalite doctor
    megalite doctor --dir /scratch/runs --json

Checks versions, GPUs, NCCL, gloo (two processes), Triton and the C compiler, shared memory, limits, cores,
the host's name, the disk of the runs and its clock, and the packages of every extra. Takes some seconds; what
hangs is ended. Exit status 1 if training cannot work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.commands.parser import Parser, as_path
from megalite.launch.checkup import host, pair, software, storage
from megalite.launch.checkup.finding import Check, Finding, bounded
from megalite.system.messages import counted
from megalite.system.progress import Progress, Report, silent

if TYPE_CHECKING:
    from rich.console import Console

SHORT_S, DISK_S, LONG_S = 20.0, 60.0, 180.0
STYLES = {"good": "green", "note": "yellow", "bad": "red"}


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    with Progress(quiet=options.quick or (options.json and not sys.stderr.isatty())) as progress:
        findings = list(examine(options.dir, quick=options.quick, report=progress))
    usable = all(finding.verdict != "bad" for finding in findings)
    if options.json:
        print(json.dumps({"usable": usable, "findings": [asdict(finding) for finding in findings]}))
    else:
        show(findings, usable)
    return 0 if usable else 1


def parser() -> Parser:
    tool = Parser(description=__doc__)
    tool.add_argument(
        "--dir",
        type=as_path,
        default=Path("runs"),
        metavar="DIR",
        help="directory for runs; its disk is tested (default runs)",
    )
    tool.add_argument(
        "--quick", action="store_true", help="skip the two processes that test torch, gloo and Triton"
    )
    tool.add_argument("--json", action="store_true", help="print only one JSON object on stdout")
    return tool


def examine(directory: Path, *, quick: bool = False, report: Report = silent) -> Iterator[Finding]:
    """Run all checks.

    Args:
        quick: skip those that start processes with torch.
    """
    checks: list[tuple[str, Check, float]] = [
        ("software", software.findings, SHORT_S),
        ("schedulers", software.schedulers, SHORT_S),
        ("GPUs", host.gpus, SHORT_S),
        ("CPU cores", host.cores, SHORT_S),
        ("C compiler", host.compiler, host.COMPILE_S + SHORT_S),
        *([] if quick else [("torch", pair.findings, LONG_S)]),
        ("/dev/shm", host.shared_memory, SHORT_S),
        ("limits", host.limits, SHORT_S),
        ("host name", host.host_name, SHORT_S),
        ("disk", partial(storage.findings, directory), DISK_S),
    ]
    for name, check, seconds in checks:
        report(f"checking {name}")
        yield from bounded(name, check, seconds)


def show(findings: list[Finding], usable: bool) -> None:
    """Format a table with a row for each finding, and a summary line."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = 140
    table(console, findings)
    notes = sum(finding.verdict == "note" for finding in findings)
    remark = counted(notes, "note")
    bad = sum(finding.verdict == "bad" for finding in findings)
    if usable:
        console.print(f"This machine can train{f'; {remark}' if notes else ''}.", style="bold green")
    else:
        console.print(
            f"This machine cannot train: {counted(bad, 'problem')}, and {remark}.", style="bold red"
        )


def table(console: Console, findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("check", "", "found", "what to do"):
        rows.add_column(heading, overflow="fold")
    for finding in findings:
        style = STYLES[finding.verdict]
        rows.add_row(
            finding.name,
            Text(finding.verdict, style),
            finding.value,
            Text(finding.advice, style if finding.verdict == "bad" else ""),
        )
    console.print(rows)

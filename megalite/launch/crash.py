"""crash.md in a run directory: one file to paste that describes the failure of a run.

Each rank that fails writes its part to .crash/. The launcher (`train --nproc`) adds those of ranks that could
not, from the lines that they printed, and writes crash.md from all parts; without it, each rank does, so that
the last one has all. The reason is that of the rank that failed first (`launch.causes`), on whichever node.
All of this is best effort: it takes a few seconds at most, raises nothing, and leaves the error as it is.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from megalite.config import run_files
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.launch import memory_kills
from megalite.launch.causes import End, ExitCause, Lost, across_hosts, by_cause, lost_in
from megalite.launch.memory_kills import MemoryKills
from megalite.launch.output import LOGS, RECENT, job_of, log_of
from megalite.system.activity import Activity
from megalite.system.files import replacing, unique_name
from megalite.system.messages import say

PART = "rank_*.json"
MOST_PARTS, MOST_LOGS, MOST_LINES = 64, 8, 60  # ranks, of these with their lines, and lines of each
PATIENCE_S = 5.0
UNKNOWN = "unknown"
PACKAGES = ("megalite", "torch", "triton", "numpy", "safetensors", "transformers")
VARIABLES = (
    *(
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "SLURM_JOB_NUM_NODES",
        "MEGALITE_JOB",
        "MEGALITE_RESTART_COUNT",
    ),
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "OMP_NUM_THREADS",
    ),
    *(
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_IB_DISABLE",
        "NCCL_IB_GID_INDEX",
        "NCCL_IB_TIMEOUT",
        "NCCL_P2P_DISABLE",
    ),
    *(
        "NCCL_ALGO",
        "NCCL_PROTO",
        "NCCL_SHM_DISABLE",
        "NCCL_NET",
        "NCCL_NVLS_ENABLE",
        "GLOO_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
    ),
    *(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_DISTRIBUTED_DEBUG",
        "TRITON_INTERPRET",
        "TORCHINDUCTOR_CACHE_DIR",
        "LD_PRELOAD",
    ),
)
"""The environment variables that a report names. Others may hold passwords and keys."""


@dataclass(frozen=True)
class RankReport:
    """The part of one rank in a crash report.

    Attributes:
        written: seconds since the epoch.
        trace: the traceback of an unexpected error.
        kind: why the rank exited.
        lost: the loss that made it fail: a `Lost` as plain data.
        status: exit status, as in `End`; 1 if the rank wrote its part itself.
        job: identifies the job on all hosts; empty if its ranks had not started it.
    """

    rank: int
    reason: str
    activity: str = UNKNOWN
    memory: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    trace: str = ""
    host: str = field(default_factory=platform.node)
    written: float = field(default_factory=time.time)
    kind: int = ExitCause.OWN
    lost: dict[str, Any] | None = None
    status: int = 1
    job: str = ""


def rank_failed(
    config: Config,
    rank: int,
    reason: str,
    *,
    activity: Activity,
    since: float,
    job: str = "",
    trace: str = "",
    lost: Lost | None = None,
    kills: MemoryKills | None = None,
) -> None:
    """Report this rank's failure.

    Args:
        since: start of the job, in seconds since the epoch. Older parts that do not name their job belong
            to another one.
        job: identifies the job.
        lost: the loss that made this rank fail; None if the error is its own.
        kills: a snapshot from the start of the job.
    """

    def write() -> None:
        directory, kind = config.run.directory, ExitCause.OWN if lost is None else ExitCause.LOST
        seen = lost
        if (
            lost is not None
            and lost.silent
            and lost.host == platform.node()
            and kills is not None
            and (killed := kills.explanation())
        ):
            seen = replace(lost, reason=f"{lost.reason}; {killed}")
        part = RankReport(
            rank,
            reason.strip(),
            str(activity),
            _own_memory(),
            RECENT.lines()[-MOST_LINES:],
            trace,
            kind=kind,
            job=job,
        )
        _write_part(directory, replace(part, lost=None if seen is None else asdict(seen)))
        if LOGS not in os.environ:
            _compose(config, since, job, reason=None)
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:
                say(f"See {directory / run_files.CRASH} for details")

    best_effort(write)


def launcher_failed(
    config: Config, ends: Sequence[End], reason: str, *, since: float, logs: Path
) -> RankReport:
    """Report the failure of the ranks of this node.

    Returns the report of the rank that failed first on any node.

    Args:
        ends: the exit of each rank.
        reason: the message of the launcher.
        logs: the directory with the output of the ranks.
    """

    job = job_of(logs)
    cause = [_part(end, logs, job) for end in by_cause(ends)[:1]]

    def write() -> None:
        directory = config.run.directory
        known = {part.rank for part in _parts(directory, since, job)}
        for place, end in enumerate(by_cause(ends)):
            if end.rank not in known:
                _write_part(directory, _part(end, logs, job), always=place == 0)
        cause[:] = completed(_parts(directory, since, job))[:1] or cause
        _compose(config, since, job, reason)
        say(f"See {directory / run_files.CRASH} for details")

    best_effort(write)
    return cause[0]


def _part(end: End, logs: Path, job: str) -> RankReport:
    """Return what the launcher knows about a rank that has not written its part."""
    reason = "stopped by the launcher" if end.kind is ExitCause.ENDED else str(end)
    lines = log_of(logs, end.rank)[-MOST_LINES:]
    return RankReport(
        end.rank, reason, lines=lines, written=end.written, kind=end.kind, status=end.status, job=job
    )


def best_effort(action: Callable[[], None]) -> None:
    """Run an action that may fail, or may hang on an unresponsive disk."""

    def run() -> None:
        with suppress(Exception):
            action()

    thread = Thread(target=run, name="megalite-crash", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)


def set_aside(directory: Path) -> None:
    """Rename the report of the last failure when a run starts to train again."""
    with suppress(OSError):
        (directory / run_files.CRASH).replace(directory / run_files.PREVIOUS_CRASH)
    shutil.rmtree(directory / run_files.CRASH_PARTS, ignore_errors=True)


# ---- parts


def _write_part(directory: Path, part: RankReport, always: bool = False) -> None:
    """Write a part, unless there are many already."""
    place = directory / run_files.CRASH_PARTS
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"rank_{part.rank:05d}.json"
    if always or path.exists() or sum(1 for _ in place.glob(PART)) < MOST_PARTS:
        _replace(path, json.dumps(asdict(part)), place)


def _parts(directory: Path, since: float, job: str) -> list[RankReport]:
    """Return the parts of this job, the earliest first.

    Times of other hosts are only used if a part does not name its job.
    """
    parts = []
    for path in sorted((directory / run_files.CRASH_PARTS).glob(PART)):
        with suppress(OSError, ValueError, TypeError):
            parts.append(RankReport(**json.loads(path.read_text(encoding="utf-8"))))
    ours = (part for part in parts if (part.job == job if job and part.job else part.written >= since))
    return sorted(ours, key=lambda part: part.written)


def _replace(path: Path, text: str, place: Path) -> None:
    """Write a file, first under a name in `place` that no other writer has.

    Ranks and launchers on several hosts write one report, in containers often with the same process number.
    """
    with replacing(path, place / unique_name(path)) as fresh:
        fresh.write_text(text, encoding="utf-8")


# ---- the report


def _compose(config: Config, since: float, job: str, reason: str | None) -> None:
    """Write crash.md from all parts, again if another part has arrived meanwhile.

    There is no lock, which a file system may not have and a killed rank would keep: the last one to write the
    report has looked for parts since. One that is killed before it can look again must not have replaced a
    newer report, so a report is not written if a part arrived while it was composed.
    """
    directory, written = config.run.directory, list[RankReport]()
    place = directory / run_files.CRASH_PARTS
    while (parts := _parts(directory, since, job)) != written:
        text = report(config, parts, reason)
        if _parts(directory, since, job) == parts:
            # moved from the directory of the parts: NFS then lists the directory anew, if it has changed
            _replace(directory / run_files.CRASH, text, place)
            written = parts


def completed(parts: Iterable[RankReport]) -> list[RankReport]:
    """Sort the parts by cause and add parts for lost ranks that have not written one."""
    by_rank = {part.rank: part for part in parts}
    for part in by_cause(by_rank.values()):
        lost = lost_in(part.lost)
        if part.kind != ExitCause.LOST or lost is None or lost.rank is None:
            continue
        own = by_rank.get(lost.rank)
        if own is None or own.kind == ExitCause.ENDED:
            lines = [] if own is None else own.lines
            by_rank[lost.rank] = RankReport(
                lost.rank, lost.reason, lost.place, lines=lines, host=lost.host, written=part.written
            )
        elif own.activity == UNKNOWN:
            by_rank[lost.rank] = replace(own, activity=lost.place)
    losses = [
        lost.rank
        for part in by_rank.values()
        if part.kind == ExitCause.LOST and (lost := lost_in(part.lost)) is not None
    ]
    return across_hosts(by_rank.values(), losses)


def report(config: Config, parts: Sequence[RankReport], reason: str | None = None) -> str:
    """Return the text of crash.md.

    Args:
        reason: the launcher's description of the failure.
    """
    ordered = completed(parts)
    reasons = [part.reason for part in ordered[:1] if part.reason not in (reason or "")]
    rows = [
        f"| {part.rank} | {part.host} | {_cell(part.reason)} | {_cell(part.activity)} |"
        for part in sorted(ordered, key=lambda part: part.rank)
    ]
    logs = [
        _section(f"Rank {part.rank}: last lines of output", "\n".join(part.lines))
        for part in ordered[:MOST_LOGS]
        if part.lines
    ]
    memory = [f"rank {part.rank}: {line}" for part in ordered for line in part.memory]
    more = f"\n\nOnly {MOST_PARTS} ranks are listed." if len(parts) >= MOST_PARTS else ""
    return (
        "\n\n".join(
            [
                f"# {config.run.name} has failed",
                time.strftime("%Y-%m-%d %H:%M:%S %z"),
                _section("Reason", "\n".join([*reasons, *([reason] if reason else [])])),
                "## Ranks\n\n| rank | host | reason | activity |\n|---|---|---|---|\n"
                + "\n".join(rows)
                + more,
                *(
                    _section(f"Rank {part.rank}: traceback", part.trace)
                    for part in ordered[:MOST_LOGS]
                    if part.trace
                ),
                *logs,
                _section("Memory", "\n".join([*memory, *_host_memory(config.run.directory)])),
                _section(
                    "Environment",
                    yaml.safe_dump(_environment(config.run.directory), sort_keys=False, allow_unicode=True),
                    "yaml",
                ),
                _section(
                    "Options that differ from the defaults",
                    yaml.safe_dump(changed_options(config), sort_keys=False),
                    "yaml",
                ),
            ]
        )
        + "\n"
    )


def _section(title: str, text: str, language: str = "") -> str:
    """Format a heading and a text block with a fence longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"## {title}\n\n{fence}{language}\n{text.strip()}\n{fence}"


def _cell(text: str) -> str:
    line = text.strip().split("\n")[0]
    return (line if len(line) <= 200 else f"{line[:199]}…").replace("|", "\\|").replace("<", "&lt;")


def changed_options(config: Config) -> dict[str, dict[str, Any]]:
    """Return the options that differ from their defaults, by section.

    Values of network.variables are only shown for known variables.
    """
    defaults, changed = to_dict(from_dict({})), dict[str, dict[str, Any]]()
    for section, options in to_dict(config).items():
        if own := {name: value for name, value in options.items() if value != defaults[section].get(name)}:
            changed[section] = own
    if variables := changed.get("network", {}).get("variables"):
        changed["network"]["variables"] = {
            name: value if name in VARIABLES else "not shown" for name, value in variables.items()
        }
    return changed


def _environment(directory: Path) -> dict[str, Any]:
    """Return versions, devices as recorded by the run, and known environment variables."""
    recorded: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        recorded = json.loads((directory / run_files.ENVIRONMENT).read_text(encoding="utf-8"))
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        "run": recorded,
        "variables": variables,
    }


def _own_memory() -> list[str]:
    """Return the host and GPU memory that this process uses."""
    import torch

    lines = []
    with suppress(OSError):
        wanted = {"VmHWM": "peak", "VmRSS": "now"}
        pairs = (
            line.split(":")
            for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            if line.split(":")[0] in wanted
        )
        lines.append(
            "host memory "
            + ", ".join(f"{wanted[name]} {int(value.split()[0]) / 2**20:.2f} GiB" for name, value in pairs)
        )
    if torch.cuda.is_initialized():
        figures = {
            "peak": torch.cuda.max_memory_allocated(),
            "now": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        lines.append(
            "GPU memory " + ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in figures.items())
        )
    return lines


def _host_memory(directory: Path) -> list[str]:
    """Return the memory of this host and container, and the free space on its disks."""
    lines = []
    with suppress(OSError):
        amounts = dict(
            line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        )
        lines += [
            f"{name}: {int(amounts[name].split()[0]) / 2**20:.1f} GiB"
            for name in ("MemTotal", "MemAvailable", "SwapFree")
            if name in amounts
        ]
    lines += memory_kills.describe()
    for place in (Path("/dev/shm"), directory):
        with suppress(OSError):
            lines.append(f"{place}: {shutil.disk_usage(place).free / 2**30:.1f} GiB free")
    return [f"{platform.node()}: {line}" for line in lines]

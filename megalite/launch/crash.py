"""crash.md in a run's directory: what one needs to know about a run that has failed, in one file to paste.

Each rank that fails writes its part to .crash/. The launcher (`train --nproc`) adds those of ranks that could not, from the lines that they
printed, and writes crash.md from all parts; without it, each rank does, so that the last one has all. All of this is best effort: it takes
a few seconds at most, raises nothing, and leaves the error as it is.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread
from typing import Any

import yaml

from megalite.activity import Activity
from megalite.config.load import from_dict, to_dict
from megalite.config.schema import Config
from megalite.launch.output import LOGS, RECENT, log_of
from megalite.messages import say

FILE, PREVIOUS, PARTS = "crash.md", "crash.previous.md", ".crash"
MOST_PARTS, MOST_LOGS, MOST_LINES = 64, 8, 60  # ranks, of these with their lines, and lines of each
PATIENCE_S = 5.0
PACKAGES = ("megalite", "torch", "triton", "numpy", "safetensors", "transformers")
VARIABLES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS"),
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_P2P_DISABLE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NCCL_NET", "NCCL_NVLS_ENABLE", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISTRIBUTED_DEBUG", "TRITON_INTERPRET", "TORCHINDUCTOR_CACHE_DIR", "LD_PRELOAD"),
)
"""The environment variables that a report names. Others may hold passwords and keys."""


@dataclass(frozen=True)
class Part:
    """What is known of one rank. `written`: seconds since the epoch; `trace`: the traceback of an unexpected error."""

    rank: int
    reason: str
    activity: str = "unknown"
    memory: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    trace: str = ""
    host: str = field(default_factory=platform.node)
    written: float = field(default_factory=time.time)


def rank_failed(config: Config, rank: int, reason: str, *, activity: Activity, since: float, trace: str = "") -> None:
    """Report this rank's failure. since: when the job began, in seconds since the epoch: older parts are another job's."""

    def write() -> None:
        directory = config.run.directory
        _write_part(directory, Part(rank, reason.strip(), str(activity), _own_memory(), RECENT.lines()[-MOST_LINES:], trace))
        if LOGS not in os.environ:
            _compose(config, since, first=None, reason=None)
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:
                say(f"{directory / FILE} has what is known about it")

    best_effort(write)


def launcher_failed(config: Config, first: int, reason: str, *, ends: Mapping[int, str], since: float, logs: Path) -> None:
    """Report the failure of the ranks of this node.

    Args:
        first: the rank that failed first.
        ends: how each rank has ended, in words.
        logs: the directory with what the ranks have printed.
    """

    def write() -> None:
        directory = config.run.directory
        known = {part.rank for part in _parts(directory, since)}
        for rank, end in ends.items():
            if rank not in known:
                _write_part(directory, Part(rank, end, lines=log_of(logs, rank)[-MOST_LINES:]), always=rank == first)
        _compose(config, since, _first_of_all_nodes(_parts(directory, since), first), reason)
        say(f"{directory / FILE} has what is known about it")

    best_effort(write)


def best_effort(action: Callable[[], None]) -> None:
    """Run an action that may fail, and may hang on a disk that does not answer."""

    def run() -> None:
        with suppress(Exception):
            action()

    thread = Thread(target=run, name="megalite-crash", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)


def set_aside(directory: Path) -> None:
    """A run that trains again keeps the report of its last failure under another name."""
    with suppress(OSError):
        (directory / FILE).replace(directory / PREVIOUS)
    shutil.rmtree(directory / PARTS, ignore_errors=True)


# ---- parts


def _first_of_all_nodes(parts: Sequence[Part], first: int) -> int:
    """The rank that failed first: that of this node, unless another node's part is older than it."""
    own = next((part for part in parts if part.rank == first), None)
    elsewhere = [part for part in parts if own is not None and part.host != own.host and part.written < own.written]
    return elsewhere[0].rank if elsewhere else first


def _write_part(directory: Path, part: Part, always: bool = False) -> None:
    """Write a part, unless there are many already."""
    place = directory / PARTS
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"rank_{part.rank:05d}.json"
    if always or len(os.listdir(place)) < MOST_PARTS or path.exists():
        _replace(path, json.dumps(asdict(part)))


def _parts(directory: Path, since: float) -> list[Part]:
    """The parts of this job, the earliest first."""
    found = []
    for path in sorted((directory / PARTS).glob("rank_*.json")):
        with suppress(OSError, ValueError, TypeError):
            found.append(Part(**json.loads(path.read_text(encoding="utf-8"))))
    return sorted((part for part in found if part.written >= since), key=lambda part: part.written)


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


# ---- the report


def _compose(config: Config, since: float, first: int | None, reason: str | None) -> None:
    """Write crash.md from all parts, again if another one has arrived meanwhile."""
    directory, written = config.run.directory, list[Part]()
    while (parts := _parts(directory, since)) != written:
        _replace(directory / FILE, report(config, parts, first, reason))
        written = parts


def report(config: Config, parts: Sequence[Part], first: int | None = None, reason: str | None = None) -> str:
    """The text of crash.md.

    first: the rank that failed first, by default that of the earliest part. reason: how it ended, in the launcher's words.
    """
    ordered = sorted(parts, key=lambda part: part.rank != first)
    said = [part.reason for part in ordered[:1] if part.reason not in (reason or "")]
    rows = [
        f"| {part.rank} | {part.host} | {_cell(part.reason)} | {_cell(part.activity)} |"
        for part in sorted(parts, key=lambda part: part.rank)
    ]
    logs = [_section(f"Rank {part.rank}: its last lines", "\n".join(part.lines)) for part in ordered[:MOST_LOGS] if part.lines]
    memory = [f"rank {part.rank}: {line}" for part in ordered for line in part.memory]
    more = f"\n\nAt most {MOST_PARTS} ranks are listed." if len(parts) >= MOST_PARTS else ""
    return (
        "\n\n".join(
            [
                f"# {config.run.name} has failed",
                time.strftime("%Y-%m-%d %H:%M:%S %z"),
                _section("Reason", "\n".join([*said, *([reason] if reason else [])])),
                "## Ranks\n\n| rank | host | ended | was in |\n|---|---|---|---|\n" + "\n".join(rows) + more,
                *(_section(f"Rank {part.rank}: traceback", part.trace) for part in ordered[:MOST_LOGS] if part.trace),
                *logs,
                _section("Memory", "\n".join([*memory, *_host_memory(config.run.directory)])),
                _section("Environment", yaml.safe_dump(_environment(config.run.directory), sort_keys=False, allow_unicode=True), "yaml"),
                _section("Options that differ from the defaults", yaml.safe_dump(changed_options(config), sort_keys=False), "yaml"),
            ]
        )
        + "\n"
    )


def _section(title: str, text: str, language: str = "") -> str:
    """A heading and a block of text, whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"## {title}\n\n{fence}{language}\n{text.strip()}\n{fence}"


def _cell(text: str) -> str:
    line = text.strip().split("\n")[0]
    return (line if len(line) <= 200 else f"{line[:199]}…").replace("|", "\\|").replace("<", "&lt;")


def changed_options(config: Config) -> dict[str, dict[str, Any]]:
    """The options that differ from their defaults, by section. Of network.variables only known ones have their values."""
    usual, found = to_dict(from_dict({})), dict[str, dict[str, Any]]()
    for section, options in to_dict(config).items():
        if changed := {name: value for name, value in options.items() if value != usual[section].get(name)}:
            found[section] = changed
    if variables := found.get("network", {}).get("variables"):
        found["network"]["variables"] = {name: value if name in VARIABLES else "not shown" for name, value in variables.items()}
    return found


def _environment(directory: Path) -> dict[str, Any]:
    """Versions, devices as the run has recorded them, and known environment variables."""
    recorded: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        recorded = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
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
    """What this process uses, on the host and on its GPU."""
    import torch

    lines = []
    with suppress(OSError):
        wanted = {"VmHWM": "peak", "VmRSS": "now"}
        pairs = (
            line.split(":") for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.split(":")[0] in wanted
        )
        lines.append("host memory " + ", ".join(f"{wanted[name]} {int(value.split()[0]) / 2**20:.2f} GiB" for name, value in pairs))
    if torch.cuda.is_initialized():
        figures = {
            "peak": torch.cuda.max_memory_allocated(),
            "now": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
        lines.append("GPU memory " + ", ".join(f"{name} {value / 2**30:.2f} GiB" for name, value in figures.items()))
    return lines


def _host_memory(directory: Path) -> list[str]:
    """What this host has: memory, that of its container, and room on its disks."""
    lines = []
    with suppress(OSError):
        found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        lines += [
            f"{name}: {int(found[name].split()[0]) / 2**20:.1f} GiB" for name in ("MemTotal", "MemAvailable", "SwapFree") if name in found
        ]
    group = Path("/sys/fs/cgroup")
    for name in ("memory.max", "memory.current", "memory.events"):
        with suppress(OSError):
            lines.append(f"container, {name}: {(group / name).read_text(encoding='utf-8').strip().replace(chr(10), ', ')}")
    for place in (Path("/dev/shm"), directory):
        with suppress(OSError):
            lines.append(f"{place}: {shutil.disk_usage(place).free / 2**30:.1f} GiB free")
    return [f"{platform.node()}: {line}" for line in lines]

"""The environment of the ranks: variables of network and allocator, and a check that all ranks have the same
software and hardware.

Imports no torch: the variables must be set before it is imported, since CUDA and torch read some of them
once, at the first use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megalite
from megalite.config.errors import ConfigError
from megalite.config.sections.network import NetworkConfig
from megalite.launch.machine import SHARED_MEMORY, driver_version

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

RankEnvironment = dict[str, Any]
"""What a rank runs on: name → value."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The names, new and old, of the variable with the settings of torch's allocator."""
EQUAL = ("kind", "megalite", "torch", "NCCL", "train.precision")
"""Must be equal on all ranks: other versions and precisions compute other numbers, and a GPU cannot
communicate with a CPU."""
ALIKE = ("driver", "device")
"""Should be equal on all ranks: rank 0 notes a difference."""


SHOWN = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "UCX_", "FI_")
"""Beginnings of the names of variables whose values may be printed."""


def variables(network: NetworkConfig) -> dict[str, str]:
    """The environment variables that the options set."""
    values = {
        "NCCL_SOCKET_IFNAME": network.interface,
        "GLOO_SOCKET_IFNAME": network.interface,
        "NCCL_DEBUG": network.debug,
        "NCCL_IB_HCA": network.ib_devices,
        "NCCL_IB_GID_INDEX": network.ib_gid_index,
        "NCCL_IB_TIMEOUT": network.ib_timeout,
        "NCCL_IB_RETRY_CNT": network.ib_retries,
        **(network.variables or {}),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def set_variables(network: NetworkConfig, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set the variables that are not set yet. Returns a line for each that has another value, which is kept.
    Call before importing torch.

    Values of variables that others than these libraries read may be secret, and are not part of the line.
    Without settings of torch's allocator its segments are expandable: activations of varying sizes then
    fragment no memory.
    """
    notes = [
        f"{name} = {present} in the environment overrides {value} from the section network"
        if name.startswith(SHOWN)
        else f"{name} in the environment overrides that of the section network"
        for name, value in variables(network).items()
        if (present := environment.setdefault(name, value)) != value
    ]
    if not any(name in environment for name in ALLOCATOR):
        environment[ALLOCATOR[0]] = "expandable_segments:True"
    return notes


def facts(device: torch.device, local_world_size: int) -> RankEnvironment:
    """This rank's software and hardware."""
    import torch

    gpu = device.type == "cuda"
    return {
        "kind": device.type,
        **software(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "driver": driver_version() if gpu else None,
        "device": torch.cuda.get_device_name(device) if gpu else "CPU",
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if gpu else None,
        "host": os.environ.get("NCCL_HOSTID") or os.uname().nodename,
        "shared_memory": _free_shared_memory(),
        "wanted_shared_memory": SHARED_MEMORY[device.type] * local_world_size,
    }


def software() -> dict[str, str]:
    """Versions of what computes."""
    import torch

    return {
        "megalite": f"{megalite.__version__} (sources {_digest(Path(megalite.__file__).parent)})",
        "torch": torch.__version__,
    }


@cache
def _digest(package: Path) -> str:
    """Eight hexadecimal digits of a hash of the package's sources."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _free_shared_memory() -> int | None:
    with suppress(OSError):
        return shutil.disk_usage("/dev/shm").free
    return None


def odd_ranks(environments: Sequence[RankEnvironment], names: Sequence[str]) -> list[str]:
    """A line for each name whose value differs between ranks: the most common value, and the ranks with
    another one."""
    lines = []
    for name in names:
        counts = Counter(own.get(name) for own in environments)
        (usual, count), *others = counts.most_common()
        if others:
            odd = (
                f"{value} on "
                f"rank{_listed([rank for rank, own in enumerate(environments) if own.get(name) == value])}"
                for value, _ in others
            )
            lines.append(f"{name}: {usual} on {count} of {len(environments)} ranks, but {', '.join(odd)}")
    return lines


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    named = ", ".join(map(str, ranks[:most])) + (
        f" and {len(ranks) - most} more" if len(ranks) > most else ""
    )
    return f" {named}" if len(ranks) == 1 else f"s {named}"


def short_of_memory(environments: Sequence[RankEnvironment]) -> list[str]:
    """A line for each host whose /dev/shm may be too small for its ranks."""
    hosts = {own["host"]: own for own in environments}
    return [
        f"{host}: /dev/shm has {own['shared_memory'] / 2**20:,.0f} MiB free, and its ranks may need"
        f" {own['wanted_shared_memory'] / 2**20:,.0f} MiB (docker run --shm-size, or --ipc host)"
        for host, own in hosts.items()
        if own["shared_memory"] is not None and own["shared_memory"] < own["wanted_shared_memory"]
    ]


def on_one_gpu(environments: Sequence[RankEnvironment]) -> list[str]:
    """A line for each GPU that several ranks have. NCCL tells hosts apart by NCCL_HOSTID, and so does
    this."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, own in enumerate(environments):
        if own["gpu"] is not None:
            users.setdefault((own["host"], own["gpu"]), []).append(rank)
    return [
        f"ranks{_listed(ranks)[1:]} have the same GPU of {host}"
        for (host, _), ranks in users.items()
        if len(ranks) > 1
    ]


def across_hosts(environments: Sequence[RankEnvironment], tp: int) -> list[str]:
    """A line if tensor-parallel ranks, which are neighbours (`megalite.mesh`), span hosts."""
    groups = [environments[first : first + tp] for first in range(0, len(environments), tp)]
    spread = [number for number, group in enumerate(groups) if len({own["host"] for own in group}) > 1]
    if not spread:
        return []
    return [
        f"parallel.tp = {tp}: {len(spread)} of {len(groups)} tp groups span several hosts, the first of them "
        "ranks"
        f" {spread[0] * tp} to {spread[0] * tp + tp - 1}: every layer waits for the network. Choose a tp "
        "that divides the ranks of a host."
    ]


def compare_ranks(own: RankEnvironment, store: Store, rank: int, size: int, *, tp: int = 1) -> list[str]:
    """Compare what all ranks run on, through the rendezvous store; returns notes for the user.

    Runs before the process group exists: between ranks that differ, its communication might fail.

    Args:
        tp: number of neighbouring ranks that communicate in every layer.

    Raises:
        ConfigError: on every rank, if ranks differ in `EQUAL`, or if several have one GPU.
    """
    store.set(f"facts/{rank}", json.dumps(own))
    if rank == 0:
        environments = [
            json.loads(each) for each in store.multi_get([f"facts/{each}" for each in range(size)])
        ]
        verdict = {
            "different": odd_ranks(environments, EQUAL),
            "shared": on_one_gpu(environments),
            "notes": [
                *odd_ranks(environments, ALIKE),
                *across_hosts(environments, tp),
                *short_of_memory(environments),
            ],
        }
        store.set("facts/verdict", json.dumps(verdict))
    verdict = json.loads(store.get("facts/verdict"))
    if verdict["different"]:
        listed = "\n  ".join(verdict["different"])
        way_out = (
            "Install the same everywhere, give train.precision a value if it is auto, or exclude these "
            "machines."
        )
        raise ConfigError(f"Ranks differ where they must not:\n  {listed}\n{way_out}")
    if verdict["shared"]:
        listed = "\n  ".join(verdict["shared"])
        raise ConfigError(
            f"NCCL gives no GPU to two ranks:\n  {listed}\nStart as many ranks per machine as it has GPUs, "
            "or set CUDA_VISIBLE_DEVICES="
            " (empty) to compute on the CPU."
        )
    return verdict["notes"]

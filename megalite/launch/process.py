"""Settings of a training process, its device, its process group, and its end.

The backend depends on the local GPU count: NCCL if a GPU is visible, one for each local rank (NCCL refuses
two ranks on one), else gloo on the CPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megalite.config.amounts import duration_seconds
from megalite.config.errors import ConfigError
from megalite.config.load import tell_torchrun
from megalite.launch import matmul_library
from megalite.launch.machine import local_world_size
from megalite.system.messages import flush_output, say

if TYPE_CHECKING:
    from megalite.launch.causes import Lost

GRACE = 2.0  # seconds that a failed rank stays alive, so that others can learn the reason
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def world_size() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device() -> torch.device:
    """Return the GPU of the local rank, or the CPU if no GPU is visible.

    If one GPU is visible it is this rank's: some launchers show each rank its own only (SLURM's
    --gpus-per-task=1). `compare_ranks` finds out if it is the same one for several ranks.

    Raises:
        ConfigError: several GPUs are visible, but fewer than local ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible, ranks = torch.cuda.device_count(), local_world_size()
    if 1 < visible < ranks:
        raise ConfigError(
            f"Each rank requires its own GPU, but this machine has {ranks} ranks and {visible} visible "
            f"GPUs. Start at most {visible} ranks per machine, or set CUDA_VISIBLE_DEVICES= (empty) to "
            "train on the CPU."
        )
    return torch.device("cuda", 0 if visible == 1 else local_rank())


def configure_process(device: torch.device, deterministic: bool = False) -> None:
    """Configure torch for speed and, on request, for deterministic algorithms.

    The settings change results by rounding at most.
    """
    if device.type == "cpu":
        configure_cpu()
    else:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def configure_cpu() -> None:
    """Use oneDNN's fp32 matmuls, batch scheduling and memory that stays mapped.

    oneDNN's fp32 matmuls are up to twice as fast as MKL's and as accurate, except where they round to bf16;
    a training run measures which library it uses (`training.matmul_choice`). Batch scheduling keeps ranks
    that share cores from preempting each other at every message. Freed memory stays with the process:
    otherwise the kernel maps and zeroes every large activation again, a tenth to a quarter of a step.
    """
    matmul_library.use(matmul_library.default())
    with suppress(AttributeError, OSError):  # not Linux, or not permitted: only slower
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(AttributeError, OSError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def start_process_group(device: torch.device, timeout: str, meet: Callable[..., None] | None = None) -> None:
    """Create the default process group if torchrun started more than one rank. Collective.

    Args:
        timeout: a duration, see run.timeout.
        meet: called before the process group exists, with the rendezvous store, this rank and the number of
            ranks; without them if there is one process.
    """
    if world_size() == 1:
        if meet is not None:
            meet()
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend, limit = (
        "nccl" if device.type == "cuda" else "gloo",
        timedelta(seconds=duration_seconds(timeout) or 0),
    )
    options: dict[str, Any] = {}
    if device.type == "cuda":
        from megalite.system import nccl

        urgent = nccl.options("urgent")  # the world may be the group of tensor parallelism or of the shards
        urgent._timeout = limit
        options = {"device_id": device, "pg_options": urgent}
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    # torchrun's store survives a restart, with the addresses of dead ranks: a prefix for each start hides
    # them. On several nodes the counts may differ between nodes, so the prefix is constant there
    # (docs/faults.md).
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if world_size() == local_world_size() else "0"
    store = dist.PrefixStore(f"start_{start}", store)  # type: ignore[attr-defined]
    if meet is not None:
        meet(store, rank, size)
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size, **options)


def exit_after_failure(
    error: Exception | str,
    reason: str = "",
    report: Callable[[str, Lost | None], None] = lambda message, lost: None,
    lost: Lost | None = None,
) -> NoReturn:
    """End the process with status 1 after a failure of communication, offloaded state, memory or data:
    nothing collective is possible.

    A failed rank makes the ranks that wait for it fail as well. In training the watchdog has told the error
    which rank failed first (`lost`). Otherwise ranks store which one they lost, and the `reason` that it
    gave. `report` is called with the message, and with what this rank has lost; None: it failed by itself.

    torchrun takes the failure with the earliest time for the cause, in whole seconds: a rank that has lost
    another one tells it later.
    """
    from megalite.launch.causes import lost_by

    with suppress(ValueError):  # on the watchdog's thread, which must not set it
        # the launcher terminates all ranks once one has ended; this one ends by itself
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lost = lost or lost_by(error)
    origin = "" if lost and lost.reason else _origin(error, reason)
    if lost and origin:
        lost = replace(lost, reason=origin)
    message = (
        f"{error}{f' ({lost.reason})' if lost and lost.reason and lost.reason not in str(error) else ''}"
    )
    say(message)
    if lost is None:
        tell_torchrun(message)
    report(message, lost)
    sleep(GRACE)  # until the ranks that wait for this one have read its reason
    if lost is not None:
        tell_torchrun(message, lost=asdict(lost))
    os._exit(1)


def _origin(error: object, reason: str) -> str:
    """Describe the rank that failed first, as far as the ranks have stored it.

    Args:
        reason: why this rank failed, if it is the first.
    """
    import torch.distributed as dist

    if world_size() == 1 or not (reason or hasattr(error, "peer")):
        return ""
    store, rank, seen = dist.distributed_c10d._get_default_store(), dist.get_rank(), set[int]()
    with suppress(RuntimeError):  # the store's rank may have failed, too
        if reason:
            store.set("reason", f"rank {rank} was lost first: {reason}")
            return ""
        if (peer := getattr(error, "peer", None)) is not None:
            store.set(f"lost/{rank}", str(peer))
        sleep(GRACE)
        if store.check(["reason"]):
            return str(store.get("reason").decode())
        while rank not in seen and store.check([f"lost/{rank}"]):
            seen.add(rank)
            rank = int(store.get(f"lost/{rank}"))
    return f"rank {rank} was lost first" if seen and rank not in seen else ""


def shutdown() -> NoReturn:
    """End the process together with the other ranks, without destroying the process group.

    The teardown of torch takes seconds per rank and has no effect any more; a rank that destroys gloo while
    another still sends may abort.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    flush_output()
    os._exit(0)

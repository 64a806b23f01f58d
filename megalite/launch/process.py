"""Settings of a training process, its device and its process group.

The backend follows the local GPU count: NCCL where every local rank has a GPU of its own (NCCL refuses two ranks on one), else gloo on CPU.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from time import sleep
from typing import Any, NoReturn

import torch

from megalite.config.rules.training import duration_seconds

GRACE = 2.0  # seconds that a rank which can not go on stays
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def world_size() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Those of them on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device() -> torch.device:
    """A GPU of its own for every local rank, or the CPU for all of them."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def configure_process(device: torch.device, deterministic: bool = False) -> None:
    """Speed settings that change no result beyond rounding, and determinism where it is asked for."""
    if device.type == "cpu":
        configure_cpu()
    else:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def configure_cpu() -> None:
    """oneDNN's AVX-512 fp32 products are twice as fast as the default ones and as accurate; with AMX it might use bf16, so not there.

    Batch scheduling keeps ranks that share cores from preempting each other at every message. Freed memory stays with the process:
    otherwise every large activation is mapped and zeroed anew by the kernel, a tenth to a quarter of a step.
    """
    if not torch.cpu._is_amx_tile_supported():
        torch.set_float32_matmul_precision("medium")
    with suppress(AttributeError, OSError):  # not Linux, or not allowed: slower, not wrong
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(AttributeError, OSError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def start_process_group(device: torch.device, timeout: str, meet: Callable[[Any, int, int], None] | None = None) -> None:
    """Join the other ranks, where torchrun started more than one.

    Args:
        timeout: a duration, see run.timeout.
        meet: called before, when nothing but a store of keys joins the ranks yet, with the store, this rank and their number.
    """
    if world_size() == 1:
        return
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=duration_seconds(timeout) or 0)
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    # torchrun's store outlives a restart, with addresses of ranks that have died; on several nodes each counts for itself: docs/faults.md
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if world_size() == local_world_size() else "0"
    store = dist.PrefixStore(f"start_{start}", store)  # type: ignore[attr-defined]
    if meet is not None:
        meet(store, rank, size)
    dist.init_process_group(backend, timeout=limit, store=store, rank=rank, world_size=size, **options)


def exit_after_failure(error: Exception | str, reason: str = "") -> NoReturn:
    """End the process after a failure of communication, of offloaded state, of memory or of data, status 1: nothing that needs other
    ranks can still be done.

    A rank that waits for one that has given up loses that one too, so all say whom they lost, and the message names where it began, with
    the `reason` that the first one gives.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all ranks once it has seen one end; this one does so by itself
    print(f"{error}{_origin(error, reason)}\n", end="", file=sys.stderr, flush=True)  # in one write: other ranks print, too
    sleep(GRACE)  # so that those who wait for this rank can ask
    os._exit(1)


def _origin(error: object, reason: str) -> str:
    """Which rank was lost first, as far as the others have said; `reason` is this rank's own, where it all began here."""
    import torch.distributed as dist

    if world_size() == 1 or not (reason or hasattr(error, "peer")):
        return ""
    store, rank, seen = dist.distributed_c10d._get_default_store(), dist.get_rank(), set[int]()
    with suppress(RuntimeError):  # the store may be gone too
        if reason:
            store.set("reason", f"rank {rank} was lost first: {reason}")
            return ""
        if (peer := getattr(error, "peer", None)) is not None:
            store.set(f"lost/{rank}", str(peer))
        sleep(GRACE)
        if store.check(["reason"]):
            return f" ({store.get('reason').decode()})"
        while rank not in seen and store.check([f"lost/{rank}"]):
            seen.add(rank)
            rank = int(store.get(f"lost/{rank}"))
    return f" (rank {rank} was lost first)" if seen and rank not in seen else ""


def shutdown() -> NoReturn:
    """End the process at once, together with the other ranks.

    Tearing torch down takes seconds a rank and changes nothing any more; a rank that tears gloo down while another still talks may abort.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

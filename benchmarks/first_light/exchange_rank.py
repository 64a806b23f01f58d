"""One rank of the part links, under torchrun: collectives and messages by size, timed on all ranks together.

Bytes are those of the whole tensor, as in `megalite.planner.hardware.links`. The bandwidth is that of the
bus, computed as in nccl-tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.calibrate import Measured
from benchmarks.measure import finish, read_spec
from megalite.launch.process import choose_device, configure_process, start_process_group

Exchange = Callable[[Tensor, Tensor, int], object]


def _message(x: Tensor, part: Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(x, 0)


OPERATIONS: dict[str, Exchange] = {
    "all-reduce": lambda x, part, rank: dist.all_reduce(x),
    "all-gather": lambda x, part, rank: dist.all_gather_into_tensor(x, part),
    "reduce-scatter": lambda x, part, rank: dist.reduce_scatter_tensor(part, x),
    "all-to-all": lambda x, part, rank: dist.all_to_all_single(torch.empty_like(x), x),
    "message": _message,
}


def bus_share(name: str, ranks: int) -> float:
    """Return how many times the bytes pass over each link."""
    return {"all-reduce": 2 * (ranks - 1) / ranks, "message": 1.0}.get(name, (ranks - 1) / ranks)


def main() -> None:
    spec = read_spec()
    device = choose_device() if spec["device"] == "cuda" else torch.device("cpu")
    configure_process(device)
    start_process_group(device, "2m")
    measured, rank, ranks = Measured(device, torch.float32), dist.get_rank(), dist.get_world_size()
    rates = {name: by_size(name, spec["sizes"], measured, rank, ranks) for name in OPERATIONS}
    finish(spec, rates if rank == 0 else None)


def by_size(name: str, sizes: list[int], measured: Measured, rank: int, ranks: int) -> dict[str, Any]:
    """Return the times of one operation, or an error if the backend does not support it.

    The error is the same on all ranks.
    """
    rows = []
    for size in sizes:
        whole = torch.zeros(size // 4 // ranks * ranks, device=measured.device)
        part = torch.zeros(whole.numel() // ranks, device=measured.device)
        try:
            seconds = measured.seconds(partial(OPERATIONS[name], whole, part, rank))
        except (RuntimeError, NotImplementedError) as error:
            return {"error": str(error).splitlines()[0][:200]}
        rows.append(
            {
                "bytes": whole.nbytes,
                "us": 1e6 * seconds,
                "gbs": bus_share(name, ranks) * whole.nbytes / seconds / 1e9,
            }
        )
    return {"sizes": rows}


if __name__ == "__main__":
    main()

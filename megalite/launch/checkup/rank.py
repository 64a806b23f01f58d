"""One of two processes that try what a run needs: torch and its GPUs, gloo, and Triton's compiler. Prints a
line of JSON for each.

    python -m megalite.launch.checkup.rank RANK STORE_FILE
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

LIMIT_S = 60


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    started = time.monotonic()
    import torch

    if rank == 0:
        tell("torch", {**torch_facts(), "seconds": time.monotonic() - started})
    tell("gloo", add(rank, store))
    if rank == 1:
        tell("triton", compiled())
    elif torch.cuda.is_available():
        tell("cuda", matmul())


def tell(what: str, result: Any) -> None:
    print(json.dumps({what: result}), flush=True)


def torch_facts() -> dict[str, Any]:
    import torch

    available = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if available
        else [],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if available else None,
    }


def add(rank: int, store: str) -> float:
    """Return the seconds of an all-reduce over both processes."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    started, values = time.monotonic(), torch.full((1024,), float(rank + 1))
    dist.all_reduce(values)
    if values.tolist() != [3.0] * 1024:
        raise RuntimeError(f"expected 3 from the sum of 1 and 2, got {values[0]}")
    return time.monotonic() - started


def matmul() -> str:
    """Run a matmul on every GPU."""
    import torch

    for index in range(torch.cuda.device_count()):
        ones = torch.ones(256, 256, device=f"cuda:{index}")
        if (ones @ ones).sum().item() != 256.0**3:
            return f"GPU {index} computes a wrong matrix product"
    return ""


def compiled() -> str:
    """Return why Triton cannot compile a kernel, or an empty text if it can.

    Without a GPU, the kernel is compiled for an A100.
    """
    import torch

    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        @triton.jit
        def kernel(pointer):  # type: ignore[no-untyped-def]
            triton.language.store(pointer, 1.0)

        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
        source = ASTSource(fn=kernel, signature={"pointer": "*fp32"}, constexprs={})
        triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32))
    except Exception as error:  # of Triton, its compiler, or the file system of its cache
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


if __name__ == "__main__":
    main()

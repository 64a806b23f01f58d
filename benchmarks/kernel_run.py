"""One process of `tools/benchmark.py kernels`: `python -m benchmarks.kernel_run SPEC.json`.

It measures groups of cases, and prints a line of JSON for every case as soon as it is measured. A failure is
reported in its line, and a kernel that breaks the device only fails its group. Times are medians with the L2
cache flushed before every call, as in triton.testing.do_bench.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
from megalite_kernels import backend

from benchmarks import (
    attention_cases,
    expert_cases,
    fp8_cases,
    hybrid_cases,
    profiled,
    quantized_cases,
    sparse_cases,
    tuning,
)
from benchmarks.kernel_cases import CASES, Function, KernelCase, Sizes
from benchmarks.measure import read_spec, timed
from benchmarks.report import ROW, version

H200_BYTES = 0.9 * 4.8e12  # bytes/s: nine tenths of the data sheet, which a good kernel reaches
NOTHING: dict[str, Any] = {
    "us": None,
    "gbps": None,
    "tflops": None,
    "of_measured": None,
    "times_limit": None,
    "extra_bytes": None,
    "peers": {},
}


def main() -> None:
    spec = read_spec()
    torch.manual_seed(0)
    smoke: bool = spec["smoke"]
    backend.select("triton")
    sizes, until = Sizes("cpu" if smoke else "cuda", smoke), time.monotonic() + spec["seconds"]
    if not smoke:
        from torch._functorch import config as functorch

        functorch.donated_buffer = False  # the backward of one forward runs many times
    device = spec["device"]
    for group in spec["groups"]:
        if group == "device":
            device = describe(sizes)
            say(device)
            continue
        cases, known = (
            {
                **CASES,
                "attention": attention_cases.cases,
                "experts": expert_cases.cases,
                "fp8": fp8_cases.cases,
                "quantized": quantized_cases.cases,
                "hybrid": hybrid_cases.cases,
                "sparse": sparse_cases.cases,
            }[group](sizes),
            profiled.launched_kernels(),
        )
        for row in (
            tuning.tune(cases, measure, smoke, until)
            if spec["tune"]
            else rows(cases, device, until, spec["leave_out"])
        ):
            now = profiled.launched_kernels()
            new, known = [row for row in now if row not in known], now
            say(
                {
                    "group": group,
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "compiled": new,
                    **row,
                }
            )


def say(row: dict[str, Any]) -> None:
    print(ROW + json.dumps(row), flush=True)


def describe(sizes: Sizes) -> dict[str, Any]:
    """Return the device and its measured limits: bytes/s of a copy, FLOP/s of a large matmul in bf16."""
    count, side = sizes.of(2**30, 2**10), sizes.of(8192, 64)
    source, target, out = sizes.randn(count), sizes.randn(count), sizes.randn(side, side)
    a, b = sizes.randn(side, side), sizes.randn(side, side)
    copy_s, matmul_s = measure(lambda: target.copy_(source)), measure(lambda: torch.mm(a, b, out=out))
    name = (
        "no GPU found: kernels run in the interpreter, at sizes that are too small to measure"
        if sizes.smoke
        else torch.cuda.get_device_name()
    )
    device = {
        "name": name,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "liger": version("liger-kernel"),
    }
    speeds = {"bytes_per_second": 4 * count / copy_s, "flops": 2 * side**3 / matmul_s}
    return {
        **device,
        **speeds,
        "limit_bytes_per_second": H200_BYTES if "H200" in name or sizes.smoke else None,
    }


def measure(function: Function) -> float:
    """Return the median seconds of a call."""
    if torch.cuda.is_available():
        return float(triton.testing.do_bench(function, return_mode="median")) / 1e3
    return min(timed(function, 0, 1))


def extra_bytes(function: Function) -> int:
    """Return the peak memory allocated during a call, minus that allocated before."""
    if not torch.cuda.is_available():
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def rows(
    cases: Iterable[KernelCase], device: dict[str, Any], until: float, leave_out: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case.

    Args:
        leave_out: names of peers that are not measured.
    """
    for case in cases:
        row: dict[str, Any] = {
            "kernel": case.kernel,
            "shape": case.shape,
            **NOTHING,
            "targets": [],
            "error": None,
        }
        contest = None
        try:
            if time.monotonic() > until:
                raise TimeoutError("out of time")
            contest = case.make()
            row |= _own(case, contest.ours, device)
            row["peers"] = {
                name: _peer(make, row["us"], until)
                for name, make in contest.peers.items()
                if name not in leave_out
            }
            row["targets"] = _judged(case, row)
        except Exception as error:  # the next case may succeed
            row["error"] = reason(error)
        yield row
        del contest
        free()


def reason(error: Exception) -> str:
    """Return the error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else ''}".rstrip(": ")


def free() -> None:
    """Free device memory, and functions compiled for other shapes."""
    if torch.cuda.is_available():
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def _own(case: KernelCase, ours: Function, device: dict[str, Any]) -> dict[str, Any]:
    extra, seconds = extra_bytes(_warm(ours)), measure(ours)
    limit = device["limit_bytes_per_second"]
    reached = (
        case.flops / seconds / device["flops"]
        if case.flops
        else case.bytes / seconds / device["bytes_per_second"]
    )
    return {
        "us": 1e6 * seconds,
        "gbps": case.bytes / seconds / 1e9 if case.bytes else None,
        "tflops": case.flops / seconds / 1e12 if case.flops else None,
        "of_measured": reached,
        "times_limit": seconds * limit / case.bytes if case.bytes and limit else None,
        "extra_bytes": extra,
    }


def _warm(function: Function) -> Function:
    """Return the function after a first call, which compiles it and allocates library workspaces."""
    function()
    return function


def _peer(make: Callable[[], Function], us: float, until: float) -> dict[str, Any]:
    try:
        if time.monotonic() > until:
            raise TimeoutError("out of time")
        function = _warm(make())
        extra, theirs = extra_bytes(function), 1e6 * measure(function)
        return {"us": theirs, "ratio": theirs / us, "extra_bytes": extra}
    except Exception as error:
        return {"error": reason(error)}
    finally:
        free()


def _judged(case: KernelCase, row: dict[str, Any]) -> list[dict[str, Any]]:
    judged = []
    for target in case.targets:
        measured = target.measure(row)
        if measured is not None:
            met = measured <= target.bound if target.at_most else measured >= target.bound
            wanted = f"{'≤' if target.at_most else '≥'} {target.bound:.3g}"
            judged.append({"target": target.name, "measured": measured, "wanted": wanted, "met": met})
    return judged


if __name__ == "__main__":
    main()

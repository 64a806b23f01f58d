"""One rank of `tools/plan.py --calibrate`: measures matmuls, memory bandwidth and communication.

All ranks measure at the same time, as in training: on a CPU the ranks share memory and, if there are more
ranks than cores, also cores.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from megalite_kernels import activation, backend, cross_entropy, norm
from megalite_kernels.attention import attention, attention_backward
from torch import Tensor

from benchmarks import host_copies
from benchmarks.measure import finish, read_spec, wait
from megalite.launch.process import choose_device, configure_process, start_process_group
from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.collectives import all_reduce
from megalite.planner.hardware.kernels import computed_pairs
from megalite.planner.hardware.links import START

REPEATS = 7
HEAT_S = 1.5
"""Time that a GPU computes before its matmuls and attention are timed: in a step it computes all the time and
is limited by its power. On an H200 a matmul that was timed at once had 775 TFLOP/s, those of a step 700."""
TINY = 8  # size of a matmul whose time is only that of its call


class Measured:
    """Measurements of one rank."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype

    def seconds(self, act: Callable[[], object]) -> float:
        """Return the median time of several calls, which all ranks make at the same time."""
        act()
        times = []
        for _ in range(REPEATS):
            wait(self.device.type)
            if dist.is_initialized():
                dist.barrier()
            started = perf_counter()
            act()
            wait(self.device.type)
            times.append(perf_counter() - started)
        return median(times)

    def sustained_seconds(self, act: Callable[[], object]) -> float:
        """`seconds`, at the clock of a GPU that computes all the time."""
        ends = perf_counter() + (HEAT_S if self.device.type == "cuda" else 0.0)
        while perf_counter() < ends:
            act()
            wait(self.device.type)
        return self.seconds(act)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def matmul(self, size: int) -> float:
        """Return the FLOP/s of the three matmuls of a linear layer with `size` rows, inputs and outputs."""
        x, weight, grad = (self.random(size, size) for _ in range(3))
        calls = max(1, min(100, int(2e9 / (6 * size**3))))

        def layer() -> None:
            for _ in range(calls):
                torch.mm(x, weight.t())
                torch.mm(grad, weight)
                torch.mm(grad.t(), x)

        return 6 * size**3 * calls / self.sustained_seconds(layer)

    def bandwidth(self, rows: int, width: int) -> float:
        """Return the bytes/s of norm, residual sum and gated activation, forward and backward.

        The bytes are those that fused kernels must move.
        """
        x, branch, dy, weight = (
            self.random(rows, width),
            self.random(rows, width),
            self.random(rows, width),
            self.random(width),
        )
        gate_up, dh = self.random(rows, 4 * width), self.random(rows, 2 * width)

        def pass_over() -> None:
            total, _, rstd = norm.add_rms_norm(x, branch, weight, 1e-5)
            norm.rms_norm_backward(dy, total, weight, rstd, 0.0, dy)
            activation.gated_forward(gate_up, "silu")
            activation.gated_backward(dh, gate_up, "silu")

        # see megalite.planner.cost.operations: 4 + 4 of the norm, 3 + 6 of the activation
        values = rows * (8 * width + 9 * 2 * width)
        return values * x.element_size() / self.seconds(pass_over)

    def loss(self, rows: int, vocabulary: int) -> float:
        """Return the bytes/s of the loss and its gradient.

        The bytes are those that fused kernels must move.
        """
        logits, targets = (
            self.random(rows, vocabulary),
            torch.zeros(rows, dtype=torch.int64, device=self.device),
        )
        scale = torch.ones((), device=self.device)

        def both() -> None:
            statistics = cross_entropy.statistics(logits, targets, 0, vocabulary, -100, False)
            _, lse = cross_entropy.combine(statistics[None], targets, -100, 0.0, 0.0, vocabulary)
            cross_entropy.gradient_(logits, targets, lse, scale, 0, vocabulary, -100, 0.0, 0.0, vocabulary)

        return 3 * logits.nbytes / self.seconds(both)

    def attention(self, sequence: int, heads: int, width: int) -> tuple[float, float]:
        """Return the FLOP/s of forward and backward, counted as in the planner."""
        q, k, v, grad = (self.random(sequence, 4, heads, width) for _ in range(4))
        out, saved = attention(q, k, v, scale=width**-0.5)
        flops = 4 * 4 * heads * width * computed_pairs(sequence, None)
        forward = self.sustained_seconds(lambda: attention(q, k, v, scale=width**-0.5))
        backward = self.sustained_seconds(
            lambda: attention_backward(grad, q, k, v, out, saved, scale=width**-0.5)
        )
        return flops / forward, 2.5 * flops / backward

    def call(self) -> float:
        """Return the seconds of an operation with negligible work.

        It is called through autograd like the operations of a layer. On a GPU this is the time of the host.
        """
        x, weight = self.random(TINY, TINY).requires_grad_(), self.random(TINY, TINY)

        def chain() -> None:
            y = x
            for _ in range(100):
                y = torch.mm(y, weight)
            y.sum().backward()

        return self.seconds(chain) / 200


def link(
    measured: Measured, exchange: Callable[[Tensor], object], share: float, sizes: tuple[int, int]
) -> dict[str, float]:
    """Compute latency and bandwidth from two message sizes.

    Args:
        share: number of times that the bytes pass over a link.
    """
    small, large = (torch.zeros(size // 4, device=measured.device) for size in sizes)
    short, long = (measured.seconds(lambda x=x: exchange(x)) for x in (small, large))  # type: ignore[misc]
    bandwidth = share * (sizes[1] - sizes[0]) / max(long - short, 1e-9)
    return {
        "gbs": bandwidth / 1e9,
        "latency_us": max(short - START - share * sizes[0] / bandwidth, 0.0) / share * 1e6,
    }


def links(measured: Measured, ranks: int, sizes: tuple[int, int]) -> dict[str, dict[str, float]]:
    """Measure the links of data parallelism, of tensor parallelism, and of messages between stages.

    Tensor parallelism on a CPU uses shared memory.
    """
    share = 2 * (ranks - 1) / ranks
    data, tensor = Mesh(Layout(dp=ranks)), Mesh(Layout(tp=ranks))
    me = dist.get_rank()

    def ping(x: Tensor) -> None:
        if me == 0:
            dist.send(x, 1)
        elif me == 1:
            dist.recv(x, 0)

    return {
        "within": link(measured, lambda x: all_reduce(x, data.dp).wait(), share, sizes),
        "tensor": link(measured, lambda x: all_reduce(x, tensor.tp).wait(), share, (sizes[0], sizes[1] // 8)),
        "messages": link(measured, ping, 1.0, (sizes[0], sizes[1] // 8)),
    }


def main() -> None:
    spec = read_spec()
    device = choose_device() if spec["device"] == "cuda" else torch.device("cpu")
    torch.set_num_threads(spec["threads"])
    configure_process(device)
    start_process_group(device, "10m")
    backend.select("auto")
    measured = Measured(device, getattr(torch, spec["dtype"]))
    products = {size: measured.matmul(size) / 1e9 for size in spec["sizes"]}
    forward, backward = measured.attention(*spec["attention"])
    measurements: dict[str, Any] = {
        "products": products,
        "memory_gbs": measured.bandwidth(*spec["rows"]) / 1e9,
        "loss_gbs": measured.loss(*spec["logits"]) / 1e9,
        "attention_gflops": [forward / 1e9, backward / 1e9],
        ("host_us" if device.type == "cuda" else "kernel_us"): 1e6 * measured.call(),
    }
    if device.type == "cuda":
        measurements["host"] = host_copies.COPIES["pinned memory to device"]()
    if spec["ranks"] > 1:
        measurements |= links(measured, spec["ranks"], tuple(spec["messages"]))
    finish(spec, measurements if not dist.is_initialized() or dist.get_rank() == 0 else None)


if __name__ == "__main__":
    main()

"""Expert cases of `tools/benchmark.py kernels`.

They are the reordering of rows by expert, and the weight gradients of experts. Shapes are those of one rank
of Mixtral 8x7B (two experts per token) and of Qwen3-30B-A3B (eight).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megalite_kernels import grouped_weight_grad, permutation
from megalite_kernels.groups import Groups
from torch import Tensor

from benchmarks.kernel_cases import EAGER, Contest, KernelCase, Sizes, forwards, times_limit


def cases(sizes: Sizes) -> Iterable[KernelCase]:
    for k, hidden in ((2, sizes.of(4096, 32)), (8, sizes.of(2048, 32))):
        yield from _rows(sizes, sizes.of(8192, 4), k, hidden)
    yield _weight_gradient(sizes, sizes.of(8, 2), sizes.of(2048, 3), sizes.of(28672, 32), sizes.of(4096, 16))


def _rows(sizes: Sizes, tokens: int, k: int, hidden: int) -> Iterable[KernelCase]:
    def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        order = torch.randperm(tokens * k, device=sizes.device)
        index = permutation.inverse_order(order, tokens * k).view(tokens, k)
        return sizes.randn(tokens * k, hidden), order, index, torch.rand(tokens, k, device=sizes.device)

    def summed(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return (rows[index] * weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    def make_gather() -> Contest:
        rows, order, _, _ = inputs()
        return Contest(
            lambda: permutation.gather_rows(rows, order), {EAGER: lambda: lambda: rows.index_select(0, order)}
        )

    def make_combine() -> Contest:
        rows, _, index, weights = inputs()
        return Contest(
            lambda: permutation.combine_rows(rows, index, weights), forwards(summed, (rows, index, weights))
        )

    def make_backward() -> Contest:
        rows, order, _, weights = inputs()
        grad = sizes.randn(tokens, hidden)
        return Contest(lambda: permutation.combine_rows_backward(grad, rows, order, weights))

    shape, element, module = (
        f"{tokens} × {hidden} bf16, {k} experts",
        2 * tokens * hidden,
        "permutation_triton",
    )
    limit = (times_limit(1.25),)
    yield KernelCase(
        "rows of experts, gathered", shape, make_gather, 2 * k * element, targets=limit, module=module
    )
    yield KernelCase(
        "rows of experts, combined", shape, make_combine, (k + 1) * element, targets=limit, module=module
    )
    yield KernelCase(
        "rows of experts, backward", shape, make_backward, (2 * k + 1) * element, targets=limit, module=module
    )


def _weight_gradient(sizes: Sizes, experts: int, rows: int, height: int, width: int) -> KernelCase:
    def make() -> Contest:
        left, right = sizes.randn(experts * rows, height), sizes.randn(experts * rows, width)
        grad = torch.zeros(experts, height, width, device=sizes.device)
        groups = Groups(torch.tensor([rows] * experts, device=sizes.device))

        def loop() -> None:
            for own, a, b in zip(grad, groups.split(left), groups.split(right), strict=True):
                if own.is_cuda:
                    torch.addmm(own, a.t(), b, out_dtype=own.dtype, out=own)
                else:
                    own.add_(a.t() @ b)

        ours = lambda: grouped_weight_grad.add_grouped_gradient(grad, left, right, groups, overwrite=False)  # noqa: E731
        return Contest(ours, {EAGER: lambda: loop})

    shape = f"{experts} experts, {rows} rows each, {height} × {width} bf16"
    module, tuned = "grouped_weight_grad_triton", ("_matmul",)
    return KernelCase(
        "weight gradients of experts",
        shape,
        make,
        flops=2.0 * experts * rows * height * width,
        module=module,
        tuned=tuned,
    )

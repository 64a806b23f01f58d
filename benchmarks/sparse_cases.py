"""Cases of an indexer and of sparse attention for `tools/benchmark.py kernels`.

They have the shapes of DeepSeek-V3.2 over a row of 8,192 tokens: 64 heads of 128 channels in the indexer, and
attention of 16 heads, those of one of eight tp ranks, to latents of 576 channels. The last queries of the row
are measured. FLOPs are those of the products over visible or selected pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from megalite_kernels import index_scores, sparse_attention
from torch import Tensor

from benchmarks.hybrid_cases import by_torch
from benchmarks.kernel_cases import EAGER, Contest, KernelCase, Sizes


def cases(sizes: Sizes) -> Iterable[KernelCase]:
    yield from _indexer(sizes)
    yield from _attention(sizes)


def _indexer(sizes: Sizes) -> Iterable[KernelCase]:
    rows, queries, heads = sizes.of(8192, 12), sizes.of(1024, 2), sizes.of(64, 2)
    dim, top = sizes.of(128, 8), sizes.of(2048, 3)
    positions = torch.arange(rows - queries, rows, device=sizes.device)[:, None]
    visible = queries * (2 * rows - queries + 1) // 2

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        w = sizes.randn(queries, 1, heads, dtype=torch.float32)
        return sizes.randn(queries, 1, heads, dim), sizes.randn(rows, 1, dim), w

    def make_selection(exact: bool) -> Contest:
        own = inputs()

        def run() -> Tensor:
            return index_scores.select(*own, top=top, positions=positions, exact=exact)

        return Contest(run, {EAGER: lambda: by_torch(run)})

    def make_gradients() -> Contest:
        own = inputs()
        selection = index_scores.select(*own, top=top, positions=positions, exact=False)
        dscores = sizes.randn(queries, 1, top, dtype=torch.float32)

        def run() -> object:
            scores = index_scores.selected_scores(*own, selection)
            return scores, index_scores.selected_scores_backward(dscores, *own, selection)

        return Contest(run, {EAGER: lambda: by_torch(run)})

    module, each = "index_scores_triton", 2 * heads * dim
    for exact, sums in (True, "fp64"), (False, "fp32"):
        yield KernelCase(
            f"selection of an indexer, sums in {sums}",
            f"{queries} of {rows} × {heads} × {dim} bf16, the best {top}",
            partial(make_selection, exact),
            flops=each * visible,
            module=module,
            tuned=("_packed",),
        )
    yield KernelCase(
        "selected scores of an indexer, both ways",
        f"{queries} × {heads} × {dim} bf16, {top} rows",
        make_gradients,
        flops=4 * each * queries * top,
        module=module,
        tuned=("_selected_scores", "_gradients"),
    )


def _attention(sizes: Sizes) -> Iterable[KernelCase]:
    rows, queries, heads = sizes.of(8192, 12), sizes.of(1024, 2), sizes.of(16, 2)
    dim, width, top = sizes.of(576, 24), sizes.of(512, 16), sizes.of(2048, 3)
    pairs = queries * heads * top

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        order = torch.rand(queries, 1, rows, device=sizes.device).argsort(-1)[..., :top]
        selection = order.sort(-1).values.int()
        return sizes.randn(queries, 1, heads, dim), sizes.randn(rows, 1, 1, dim), selection

    def make_forward() -> Contest:
        q, keys, selection = inputs()

        def run() -> object:
            return sparse_attention.forward(q, keys, width, selection, dim**-0.5)

        return Contest(run, {EAGER: lambda: by_torch(run)})

    def make_backward() -> Contest:
        q, keys, selection = inputs()
        out, lse = sparse_attention.forward(q, keys, width, selection, dim**-0.5)
        dout = sizes.randn(queries, 1, heads, width)

        def run() -> object:
            return sparse_attention.backward(dout, q, keys, width, out, lse, selection, dim**-0.5)

        return Contest(run, {EAGER: lambda: by_torch(run)})

    def make_probabilities() -> Contest:
        q, keys, selection = inputs()
        lse = sparse_attention.forward(q, keys, width, selection, dim**-0.5)[1]

        def run() -> object:
            return sparse_attention.probabilities(q, keys, selection, lse, dim**-0.5)

        return Contest(run, {EAGER: lambda: by_torch(run)})

    shape, module = f"{queries} × {heads} × {dim} bf16, {top} of {rows} rows", "sparse_attention_triton"
    yield KernelCase(
        "sparse attention to latents, forward",
        shape,
        make_forward,
        flops=2 * pairs * (dim + width),
        module=module,
        tuned=("_forward",),
    )
    yield KernelCase(
        "sparse attention to latents, backward",
        shape,
        make_backward,
        flops=2 * pairs * (3 * dim + 2 * width),
        module=module,
        tuned=("_backward",),
    )
    yield KernelCase(
        "summed probabilities of sparse attention",
        shape,
        make_probabilities,
        flops=2 * pairs * dim,
        module=module,
        tuned=("_probabilities",),
    )

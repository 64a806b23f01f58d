"""Behavior of the libraries below torch that is not documented. It is measured, but not tested.

megalite does not depend on this behavior.

- Matmuls in bf16: whether partial sums are rounded to bf16 (`allow_bf16_reduced_precision_reduction`, on by
  default in torch), with the error of long sums against float64 with and without it, and of a matmul with
  fp32 output.
- The grouped matmul of experts: groups without rows, no rows at all, rows after the last group.
- cuDNN attention: layouts of q, k, v and of the output gradient, and a length that is not a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megalite_kernels.attention_library import CUDNN, Options, by_head
from megalite_kernels.groups import Groups
from torch import Tensor

from benchmarks.first_light import values
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.parallel.expert.grouped_matmul import matmul_loop


def rows(scene: Scene) -> Iterator[Row]:
    torch.manual_seed(0)
    yield guarded("bf16 products, sums of parts", "measurement", partial(_reduction, scene))
    for name, sizes, count in GROUPS:
        yield guarded(
            f"grouped product, {name}",
            "measurement",
            partial(_grouped, f"grouped product, {name}", sizes, count, scene),
        )
    # last: a kernel that reads beyond a tensor may break the device's context
    for name, layout in LAYOUTS.items():
        if scene.gpus:
            yield guarded(f"cuDNN, {name}", "measurement", partial(_cudnn, f"cuDNN, {name}", layout, scene))
        else:
            yield absent(f"cuDNN, {name}", "no GPU found")


def _error(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


def _reduction(scene: Scene) -> Row:
    """Measure long sums with few outputs, which a library splits into parts."""
    left, right = (
        torch.randn(scene.sized(size, 32), scene.sized(1 << 16, 256), device=scene.device).bfloat16()
        for size in (256, 512)
    )
    exact, settings = left.double() @ right.double().t(), torch.backends.cuda.matmul
    before, errors = settings.allow_bf16_reduced_precision_reduction, dict[str, float]()
    try:
        for allowed in (True, False):
            settings.allow_bf16_reduced_precision_reduction = allowed
            errors["allowed" if allowed else "not allowed"] = _error(left @ right.t(), exact)
            if scene.gpus:
                errors[f"fp32, {'' if allowed else 'not '}allowed"] = _error(
                    torch.mm(left, right.t(), out_dtype=torch.float32), exact
                )
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
    said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return row(
        "bf16 products, sums of parts",
        "measured",
        f"relative error with reduced-precision reduction: {said}",
        errors=errors,
    )


GROUPS = (
    ("a group without rows", (300, 0, 212), 512),
    ("no rows", (0, 0, 0), 0),
    ("rows, but none of a group", (0, 0, 0), 512),
    ("rows after the last group", (100, 0, 56), 512),
)


def _grouped(name: str, sizes: tuple[int, ...], count: int, scene: Scene) -> Row:
    """Compare with a loop over groups, in the rows of the groups."""
    inputs = torch.randn(count, 256, device=scene.device).bfloat16()
    matrices = torch.randn(len(sizes), 128, 256, device=scene.device).bfloat16().transpose(1, 2)
    groups = Groups(torch.tensor(sizes, device=scene.device))
    result = torch.nn.functional.grouped_mm(inputs, matrices, offs=groups.ends)
    expected = matmul_loop(inputs, matrices, groups)
    taken = sum(sizes)
    error = _error(result[:taken], expected[:taken].double()) if taken else 0.0
    return row(
        name,
        "measured",
        f"accepted, shape {tuple(result.shape)}; differs from per-group matmuls by {error:.1e}",
        error=error,
    )


Made = Callable[[Scene], tuple[Tensor, Tensor, Tensor, Tensor]]


def _layout(
    length: int, arrange: Callable[[Tensor], Tensor], of_gradient: Callable[[Tensor], Tensor]
) -> Made:
    """Return q, k, v and dout [length, 2, 8, 128] with a given memory layout."""

    def made(scene: Scene) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v, dout = (torch.randn(length, 2, 8, 128, device=scene.device).bfloat16() for _ in range(4))
        return arrange(q), arrange(k), arrange(v), of_gradient(dout)

    return made


def _packed(x: Tensor) -> Tensor:
    """Return a third of the heads of a packed projection."""
    return torch.cat((x, x, x), dim=2)[:, :, : x.shape[2]]


def _rows_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


LAYOUTS: dict[str, Made] = {
    "views of a packed projection": _layout(512, _packed, torch.clone),
    "positions first": _layout(512, torch.clone, torch.clone),
    "positions first, gradient by rows": _layout(512, torch.clone, _rows_first),
    "rows first": _layout(512, _rows_first, torch.clone),
    "heads first": _layout(512, _heads_first, torch.clone),
    "200 positions": _layout(200, _packed, torch.clone),
}


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: tuple[Tensor, ...], options: Options
) -> list[Tensor]:
    """Compute the backward of `CUDNN` without making dout contiguous.

    torch caches cuDNN's plan by the strides of q, k and v only, so `CUDNN` makes dout contiguous.
    """
    (lse, *state), length = saved, q.shape[0]
    backward, tensors = (
        torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
        map(by_head, (dout, q, k, v, out)),
    )
    whole = (None, None, None, length, length, 0.0, True)  # no bias, rows of one length, no dropout, causal
    gradients = backward(*tensors, lse, *state, *whole, scale=options.scale)
    return [x.permute(2, 0, 1, 3) for x in gradients]


def _cudnn(name: str, inputs: Made, scene: Scene) -> Row:
    """Compare the largest error of out, dq, dk and dv against float64 with that of the bf16 reference."""
    given = inputs(scene)
    q, k, v, dout = given
    options = Options(q.shape[-1] ** -0.5)
    out, saved = CUDNN.forward(q, k, v, options)
    got = out, *_backward(dout, q, k, v, out, saved, options)
    exact, near = (values._attention_by_definition(*x) for x in ([each.double() for each in given], given))
    ours, theirs = (max(_error(x, y) for x, y in zip(result, exact, strict=True)) for result in (got, near))
    finite = all(bool(x.isfinite().all()) for x in got)
    detail = (
        f"relative error {ours:.1e}, of the reference {theirs:.1e}" if finite else "NaN or infinite values"
    )
    return row(name, "measured", detail, error=ours, definition=theirs, finite=finite)

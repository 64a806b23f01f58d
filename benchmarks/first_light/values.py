"""Part 2: all kernels against float64, with the same inputs, and the tests marked gpu.

The error of a kernel must be close to that of the plain torch reference in the same precision
(`tests/kernels/accuracy.py`). In a rehearsal Triton's interpreter runs the kernels in fp32 or fp16, because
its bf16 differs from that of a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, get_args
from zlib import crc32

import torch
from megalite_kernels import (
    activation,
    adamw,
    attention,
    backend,
    causal_conv,
    cross_entropy,
    dropout,
    fp8,
    fp8_matmul,
    gated_norm,
    grad_norm,
    index_scores,
    norm,
    ordered_sum,
    recurrence,
    rotary,
    router_logits,
    sparse_attention,
)
from torch import Tensor

from benchmarks import report
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue
from tests.kernels.accuracy import assert_as_accurate, truncated

EPS = 1e-5
TESTS = ("tests/kernels", "tests/training/test_gpu_step.py", "tests/distributed/test_offload.py")
REHEARSED = ("tests/training/test_gpu_step.py",)
OUTCOME = re.compile(
    r"(?:\[gw\d+\] \[ *\d+%\] )?(?:(PASSED|FAILED|ERROR|SKIPPED) )?(tests/\S+::.+?)(?: "
    r"(PASSED|FAILED|ERROR|SKIPPED).*)?$"
)

Compute = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Check:
    """An operation to check.

    Attributes:
        inputs: float64 on the CPU, and integers.
        compute: the operation through the function that the model calls.
        peer: torch's own computation of the same, if the reference rounds less often than any kernel can.
        rehearsed: the precision in a rehearsal.
        depth: of a matmul of 16-bit operands whose result is fp32.
    """

    name: str
    inputs: Callable[[Scene], Sequence[Tensor]]
    compute: Compute
    peer: Compute | None = None
    rehearsed: torch.dtype = torch.float32
    depth: int = 0


def rows(scene: Scene) -> Iterator[Row]:
    if scene.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which the first kernel does
    for check in CHECKS:
        dtypes = (check.rehearsed,) if scene.rehearse else (torch.bfloat16, torch.float32)
        for dtype in dtypes if find_spec("triton") else ():
            name = f"{check.name}, {str(dtype).removeprefix('torch.')}"
            yield guarded(name, "proof", partial(compared, check, name, dtype, scene))
    if find_spec("triton") is None:
        yield absent("kernels against float64", "triton is not installed")
    yield from suite(scene)


def compared(check: Check, name: str, dtype: torch.dtype, scene: Scene) -> Row:
    """Run an operation with its kernel, with its reference, and in float64.

    Raises:
        AssertionError: the kernel is less accurate.
    """
    torch.manual_seed(crc32(check.name.encode()))
    host = [x.to(dtype) if x.is_floating_point() else x for x in check.inputs(scene)]

    def results(kernels: str, compute: Compute, wide: bool = False) -> list[Tensor]:
        backend.select(kernels)
        try:
            given = [
                x.to(scene.device, torch.float64 if wide and x.is_floating_point() else x.dtype, copy=True)
                for x in host
            ]
            return list(compute(*given))
        finally:
            backend.select("torch")

    exact = results("torch", check.compute, wide=True)
    kernel, reference = results("triton", check.compute), results("torch", check.peer or check.compute)
    worst = 0.0
    for got, true, near in zip(kernel, exact, reference, strict=True):
        lost = truncated(check.depth, got) if dtype == torch.bfloat16 else 0
        assert_as_accurate(got.to(near.dtype), true.double(), near, lost)
        worst = max(worst, ((got.double() - true).norm() / true.double().norm().clamp(min=1e-30)).item())
    how = "interpreted" if scene.rehearse else "compiled"
    return row(name, "passed", f"{how}; relative error {worst:.1e}", error=worst)


# ---- the operations


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _wide(scene: Scene) -> tuple[int, int]:
    """Return the number of rows and columns."""
    return scene.sized(1000, 6), scene.sized(4096, 96)


def _rms_norm(x: Tensor, branch: Tensor, weight: Tensor, dy: Tensor) -> Sequence[Tensor]:
    total, y, rstd = norm.add_rms_norm(x, branch, weight, EPS)
    dx, dweight = norm.rms_norm_backward(dy, total, weight, rstd, 0.0, x)
    assert dweight is not None
    return y, dx, dweight


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> Sequence[Tensor]:
    y, mean, rstd = norm.layer_norm(x, weight, bias, EPS)
    dx, dweight, _ = norm.layer_norm_backward(dy, x, weight, mean, rstd, 0.0)
    assert dweight is not None
    return y, dx, dweight


def _activation(gate_up: Tensor, dh: Tensor) -> Sequence[Tensor]:
    return activation.gated_forward(gate_up, "silu"), activation.gated_backward(dh, gate_up, "silu")[1]


def _dropout(x: Tensor, samples: Tensor, positions: Tensor) -> Sequence[Tensor]:
    return (dropout.dropout(x, 7, samples, positions, 0.1),)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Sequence[Tensor]:
    width = logits.shape[1]
    statistics = cross_entropy.statistics(logits, targets, 0, width, -100, False)
    loss, lse = cross_entropy.combine(statistics[None], targets, -100, 0.0, 0.0, width)
    return loss, cross_entropy.gradient_(logits, targets, lse, 0.5, 0, width, -100, 0.0, 0.0, width)


def _rotary(packed: Tensor) -> Sequence[Tensor]:
    tables = rotary.rotary_tables(torch.arange(packed.shape[0]), 64, 5e5, None, packed.dtype, packed.device)
    q, k, v = rotary.split_rotary(packed, 4, 2, 64, *tables)
    return q, k, rotary.split_rotary_backward(q, k, v, *tables)


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Sequence[Tensor]:
    p, m, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (p, m, v))
    state = [p, m, v.square()]
    scale = torch.full((), 2.0, device=p.device)
    options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw.adamw_(
        [state[0]], [g.to(state[0].dtype)], [state[1]], [state[2]], step=3, grad_scale=scale, **options
    )
    return state


def _squares(x: Tensor) -> Sequence[Tensor]:
    """Compute in fp32, because the reference's error in float64 may be 0 by chance."""
    return (grad_norm.squared_sum([x]).to(torch.promote_types(x.dtype, torch.float32)),)


def _ordered_sum(parts: Tensor) -> Sequence[Tensor]:
    total = torch.empty(
        parts.shape[1], dtype=torch.promote_types(parts.dtype, torch.float32), device=parts.device
    )
    ordered_sum.ordered_sum(parts, total)
    return (total,)


def _weight_gradient(left: Tensor, inputs: Tensor) -> Sequence[Tensor]:
    """Accumulate two microbatches in an accumulator with undefined content."""
    spec = ParamSpec("head.weight", 1, (Segment("head.weight", (left.shape[1], inputs.shape[1])),))
    wide = torch.promote_types(left.dtype, torch.float32)
    tensor = torch.zeros(left.shape[1], inputs.shape[1], dtype=left.dtype, device=left.device)
    weight = Weight(spec, tensor, wide, WeightGradQueue())
    weight.grad = torch.full_like(tensor, torch.nan, dtype=wide)
    weight.begin_step(2, 1)
    for _ in range(2):
        weight.add_matmul(left, inputs, None)
    assert weight.grad is not None
    return (weight.grad,)


def _exact_matmul(left: Tensor, inputs: Tensor) -> Sequence[Tensor]:
    wide = torch.promote_types(left.dtype, torch.float32)
    return (2 * (left.to(wide).t() @ inputs.to(wide)),)


def _logits(rows: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return (router_logits.logits(rows, weight),)


def _cast_logits(rows: Tensor, weight: Tensor) -> Sequence[Tensor]:
    return (router_logits.ROUTES["cast"](rows, weight),)


def _fp8(recipe: fp8.Recipe, x: Tensor, weight: Tensor, dy: Tensor) -> Sequence[Tensor]:
    """Quantize, and multiply in the forward and for the input gradient; on a GPU into bf16."""
    if recipe == "mxfp8":
        rows, grads, along_inputs, along_outputs = map(fp8.quantize_mx, (x, dy, weight, weight.t()))
    else:
        rows, grads = (fp8.quantize(each, (1, 128)) for each in (x, dy))
        along_inputs = fp8.quantize(weight, (128, 128))
        along_outputs = along_inputs.t
    dtype = torch.bfloat16 if x.is_cuda and x.dtype != torch.float64 else x.dtype
    return [fp8_matmul.multiply(*each, dtype) for each in ((rows, along_inputs), (grads, along_outputs))]


def _attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *starts: Tensor) -> Sequence[Tensor]:
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5, "document_start": starts[0] if starts else None}
    out, saved = attention.attention(q, k, v, **options)
    return out, *attention.attention_backward(dout, q, k, v, out, saved, **options)


def _attention_by_definition(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *starts: Tensor
) -> Sequence[Tensor]:
    """Compute scores, softmax and sums in the precision of the inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    by_head = [x.permute(1, 2, 0, 3) for x in leaves]
    group, position = q.shape[2] // k.shape[2], torch.arange(q.shape[0], device=q.device)
    key, value = (x.repeat_interleave(group, 1) for x in by_head[1:])
    hidden = (position > position[:, None])[None]
    if starts:
        hidden = hidden | (position < starts[0].T[:, :, None])
    scores = (by_head[0] @ key.mT * q.shape[-1] ** -0.5).masked_fill(hidden.unsqueeze(1), -torch.inf)
    out = (scores.softmax(-1) @ value).permute(2, 0, 1, 3)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def _attention_inputs(documents: bool, scene: Scene) -> Sequence[Tensor]:
    length, heads, dim = scene.sized(512, 32), scene.sized(8, 2), scene.sized(128, 16)
    tensors = [_randn(length, 2, count, dim) for count in (heads, heads // 2, heads // 2, heads)]
    starts = (torch.arange(length) // 24 * 24).unsqueeze(1).expand(-1, 2).contiguous()
    return [*tensors, *([starts] if documents else [])]


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, dout: Tensor, starts: Tensor
) -> Sequence[Tensor]:
    options: dict[str, Any] = {"starts": starts, "halo": causal_conv.Halo(before)}
    gradients = causal_conv.backward(dout, x, weight, bias, **options)
    assert gradients.bias is not None
    return (
        causal_conv.forward(x, weight, bias, **options),
        gradients.x,
        gradients.weight,
        gradients.bias,
        gradients.halo,
    )


def _gated_norm(gate: gated_norm.Gate, x: Tensor, z: Tensor, weight: Tensor, dy: Tensor) -> Sequence[Tensor]:
    y = gated_norm.whole_forward(x, z, weight, gate, EPS, False)
    return y, *gated_norm.whole_backward(dy, x, z, weight, gate, EPS)


def _recurrence_inputs(kind: str, scene: Scene) -> Sequence[Tensor]:
    """Return q, k, v, the gradient of the output, the states before and after, decay and strength."""
    length, heads, dk = scene.sized(1000, 70), scene.sized(4, 1), scene.sized(128, 16)
    dv = dk // 2 if kind == "mamba" else dk
    q, k = (torch.nn.functional.normalize(_randn(length, 1, heads, dk), dim=-1) for _ in range(2))
    decay = (length, 1, heads, dk) if kind == "channel" else (length, 1, heads)
    strength = torch.rand(length, 1, heads, dtype=torch.float64)
    starts = torch.where(torch.arange(length) < 45, -1, 45).unsqueeze(1)
    states = [_randn(1, heads, dk, dv) for _ in range(2)]
    gate = -torch.rand(decay, dtype=torch.float64) / 16
    return [q, k, _randn(length, 1, heads, dv), _randn(length, 1, heads, dv), *states, gate, strength, starts]


def _recurrence(kind: str, *given: Tensor) -> Sequence[Tensor]:
    q, k, v, dout, initial, dfinal, decay, strength, starts = given
    beta = None if kind == "mamba" else strength
    tokens = recurrence.Tokens(q, k, v, decay, beta, starts)
    out, final = recurrence.forward(tokens, initial)
    gradients = recurrence.backward(dout, tokens, initial, dfinal)
    return [x.to(v.dtype) for x in (out, final, *gradients) if x is not None]


def _one_by_one(kind: str, *given: Tensor) -> Sequence[Tensor]:
    """Compute in the precision of the inputs: token by token if it is one that the reference widens."""
    if given[0].dtype not in (torch.bfloat16, torch.float16):
        return _recurrence(kind, *given)
    leaves = [x.detach().requires_grad_() for x in (*given[:3], *given[6:8], given[4])]
    q, k, v, decay, strength, state = leaves
    outputs = []
    for position in range(len(v)):
        state = state.masked_fill(given[8][position].eq(position).view(-1, 1, 1, 1), 0.0)
        factor = decay[position].exp()
        state = state * (factor[..., None, None] if factor.ndim == 2 else factor[..., None])
        value = v[position]
        if kind != "mamba":
            seen = torch.einsum("bhkv,bhk->bhv", state, k[position])
            value = strength[position].unsqueeze(-1) * (value - seen)
        state = state + k[position].unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[position]))
    out = torch.stack(outputs)
    used = leaves if kind != "mamba" else [*leaves[:4], leaves[5]]
    gradients = torch.autograd.grad((out * given[3]).sum() + (state * given[5]).sum(), used)
    return [x.detach() for x in (out, state, *gradients)]


def _indexer_inputs(scene: Scene) -> Sequence[Tensor]:
    """Return queries, keys, weights, the gradient of the scores, and positions."""
    length, heads, dim, top = (
        scene.sized(512, 8),
        scene.sized(64, 4),
        scene.sized(128, 8),
        scene.sized(128, 3),
    )
    tensors = [_randn(length, 1, heads, dim), _randn(length, 1, dim), _randn(length, 1, heads)]
    return [*tensors, _randn(length, 1, top), torch.arange(length).unsqueeze(1)]


def _selection(q: Tensor, k: Tensor, w: Tensor, dscores: Tensor, positions: Tensor) -> Sequence[Tensor]:
    return (index_scores.select(q, k, w, top=dscores.shape[2], positions=positions).float(),)


def _rows_before(positions: Tensor, top: int) -> Tensor:
    """Return a selection: the first row, and others right before each query."""
    rows = positions.unsqueeze(2) - torch.arange(top, device=positions.device).flip(0)
    rows = torch.cat((torch.zeros_like(rows[..., :1]), rows[..., 1:]), -1)
    exists = torch.arange(top, device=positions.device) <= positions.unsqueeze(2)
    first = torch.arange(top, device=positions.device).expand(rows.shape)
    return torch.where(positions.unsqueeze(2) < top, torch.where(exists, first, -1), rows).int()


def _selected_scores(q: Tensor, k: Tensor, w: Tensor, dscores: Tensor, positions: Tensor) -> Sequence[Tensor]:
    selection = _rows_before(positions, dscores.shape[2])
    scores = index_scores.selected_scores(q, k, w, selection).masked_fill(selection < 0, 0)
    return scores, *index_scores.selected_scores_backward(dscores, q, k, w, selection)


def _scores_by_definition(
    q: Tensor, k: Tensor, w: Tensor, dscores: Tensor, positions: Tensor
) -> Sequence[Tensor]:
    """Compute with all rows, in the precision of the inputs."""
    selection = _rows_before(positions, dscores.shape[2])
    leaves = [x.detach().requires_grad_() for x in (q, k, w)]
    products = torch.einsum("sbhd,tbd->sbht", *leaves[:2]).relu()
    scores = torch.einsum("sbh,sbht->sbt", leaves[2], products).gather(2, selection.clamp_min(0).long())
    scores = scores.masked_fill(selection < 0, 0)
    return scores.detach(), *torch.autograd.grad(scores, leaves, dscores)


def _sparse_inputs(latents: bool, scene: Scene) -> Sequence[Tensor]:
    """Return queries, keys, values (of latents, only their number counts), the output's gradient, and a
    selection."""
    length, heads, top = scene.sized(256, 6), scene.sized(64, 2), scene.sized(128, 3)
    dim, width = scene.sized(576, 24), scene.sized(512, 16)
    if not latents:
        heads, dim, width = scene.sized(8, 2), scene.sized(192, 24), scene.sized(128, 16)
    groups = 1 if latents else heads
    shapes = (heads, dim), (groups, dim), (groups, width), (heads, width)
    tensors = [_randn(length, 1, count, channels) for count, channels in shapes]
    return [*tensors, _rows_before(torch.arange(length).unsqueeze(1), top)]


def _sparse_attention(
    q: Tensor, keys: Tensor, values: Tensor, dout: Tensor, selection: Tensor
) -> Sequence[Tensor]:
    scale, shared = q.shape[-1] ** -0.5, keys.shape[2] == 1
    given = values.shape[3] if shared else values
    out, lse = sparse_attention.forward(q, keys, given, selection, scale)
    gradients = sparse_attention.backward(dout, q, keys, given, out, lse, selection, scale)
    p = sparse_attention.probabilities(q, keys, selection, lse, scale)
    return [x for x in (out, p, *gradients) if x is not None]


def _sparse_by_definition(
    q: Tensor, keys: Tensor, values: Tensor, dout: Tensor, selection: Tensor
) -> Sequence[Tensor]:
    """Compute with all rows, in the precision of the inputs."""
    shared, rows = keys.shape[2] == 1, len(keys)
    leaves = [x.detach().requires_grad_() for x in ((q, keys) if shared else (q, keys, values))]
    key, value = leaves[1], leaves[1][..., : values.shape[3]] if shared else leaves[2]
    key, value = (x.expand(-1, -1, q.shape[2], -1) for x in (key, value))
    chosen = torch.zeros(*selection.shape[:2], rows + 1, dtype=torch.bool, device=q.device)
    chosen.scatter_(2, selection.long().masked_fill(selection < 0, rows), True)
    scores = torch.einsum("sbhd,tbhd->sbht", leaves[0], key) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~chosen[:, :, None, :rows], -torch.inf).softmax(-1)
    out = torch.einsum("sbht,tbhd->sbhd", p, value)
    summed = p.sum(2).gather(2, selection.clamp_min(0).long()).masked_fill(selection < 0, 0)
    return out.detach(), summed.detach(), *torch.autograd.grad(out, leaves, dout)


CHECKS = (
    Check(
        "weight gradient, summed",
        lambda scene: [_randn(n, m) for n, m in [_wide(scene)] * 2],
        _weight_gradient,
        _exact_matmul,
        depth=1000,
    ),
    Check(
        "router's logits",
        lambda scene: [_randn(*_wide(scene)), _randn(scene.sized(256, 6), _wide(scene)[1])],
        _logits,
        _cast_logits,
        depth=4096,
    ),
    *(
        Check(
            f"fp8 matmul, {recipe}",
            lambda s: [_randn(s.sized(1000, 5), 384), _randn(256, 384), _randn(s.sized(1000, 5), 256)],
            partial(_fp8, recipe),
        )
        for recipe in get_args(fp8.Recipe)
    ),
    Check(
        "residual and RMSNorm",
        lambda s: [_randn(*_wide(s)), _randn(*_wide(s)), _randn(_wide(s)[1]), _randn(*_wide(s))],
        _rms_norm,
    ),
    Check(
        "LayerNorm",
        lambda s: [_randn(*_wide(s)), _randn(_wide(s)[1]), _randn(_wide(s)[1]), _randn(*_wide(s))],
        _layer_norm,
    ),
    Check("SwiGLU", lambda s: [_randn(_wide(s)[0], 2 * _wide(s)[1]), _randn(*_wide(s))], _activation),
    Check(
        "dropout",
        lambda s: [_randn(_wide(s)[0], 2, _wide(s)[1]), torch.tensor([3, 2**40]), torch.arange(_wide(s)[0])],
        _dropout,
    ),
    Check(
        "cross-entropy",
        lambda s: [_randn(*_wide(s)), torch.arange(_wide(s)[0]) % _wide(s)[1]],
        _cross_entropy,
    ),
    Check("rotary embedding", lambda s: [_randn(s.sized(500, 8), 2, 8 * 64)], _rotary),
    Check("AdamW", lambda s: [_randn(s.sized(100_000, 500)) for _ in range(4)], _adamw),
    Check("gradient norm", lambda s: [_randn(s.sized(1_000_003, 700))], _squares),
    Check("ordered sum", lambda s: [_randn(3, s.sized(100_000, 500))], _ordered_sum),
    Check(
        "causal convolution",
        lambda s: [
            *(_randn(s.sized(1000, 40), 2, 96), _randn(96, 4), _randn(96), _randn(3, 2, 96)),
            *(_randn(s.sized(1000, 40), 2, 96), torch.arange(s.sized(1000, 40)).unsqueeze(1) // 7 * 7),
        ],
        _convolution,
    ),
    *(
        Check(
            f"gated norm, {gate}",
            lambda s: [
                *(_randn(_wide(s)[0], 2, 128) for _ in range(2)),
                _randn(128),
                _randn(_wide(s)[0], 2, 128),
            ],
            partial(_gated_norm, gate),
        )
        for gate in get_args(gated_norm.Gate)
    ),
    *(
        Check(
            f"recurrence, {kind}",
            partial(_recurrence_inputs, kind),
            partial(_recurrence, kind),
            partial(_one_by_one, kind),
            torch.float16,
        )
        for kind in ("head", "channel", "mamba")
    ),
    Check("selection of an indexer", _indexer_inputs, _selection, rehearsed=torch.float16),
    Check("scores of an indexer", _indexer_inputs, _selected_scores, _scores_by_definition, torch.float16),
    *(
        Check(
            f"sparse attention to {'latents' if latents else 'keys of each head'}",
            partial(_sparse_inputs, latents),
            _sparse_attention,
            _sparse_by_definition,
            torch.float16,
        )
        for latents in (True, False)
    ),
    Check(
        "attention", partial(_attention_inputs, False), _attention, _attention_by_definition, torch.float16
    ),
    Check(
        "attention with documents",
        partial(_attention_inputs, True),
        _attention,
        _attention_by_definition,
        torch.float16,
    ),
)


# ---- the tests of the checkout


def suite(scene: Scene) -> Iterator[Row]:
    """Run `pytest -m gpu`, and yield a row for the passed tests and one for each failure."""
    if find_spec("pytest") is None or find_spec("hypothesis") is None:
        yield absent("pytest -m gpu", "pytest or hypothesis is not installed")
        return
    workers = min(8, report.cores() // 2)
    parallel = ["-n", str(workers)] if workers > 1 and find_spec("xdist") else ["-p", "no:xdist"]
    options = [
        "-m",
        "gpu",
        "-v",
        "--color=no",
        "-rfE",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
    ]
    command = [sys.executable, "-m", "pytest", *options, *parallel, *(REHEARSED if scene.rehearse else TESTS)]
    limit = max(scene.left - 5.0, 20.0)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        try:
            subprocess.run(command, cwd=report.ROOT, stdout=output, stderr=output, timeout=limit, check=False)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        output.seek(0)
        yield from outcomes(output.read(), late, limit)


def outcomes(text: str, late: bool, limit: float) -> Iterator[Row]:
    """Yield the outcomes in pytest's verbose output, even if it was ended at the limit."""
    verdicts: dict[str, str] = {}
    for line in text.splitlines():
        if (match := OUTCOME.fullmatch(line.strip())) and (outcome := match[1] or match[3]):
            verdicts.setdefault(match[2].partition(" - ")[0], outcome)
    reasons = dict(re.findall(r"^(?:FAILED|ERROR) (tests/\S+::.+?) - (.+)$", text, re.MULTILINE))
    count = {
        outcome: sum(each == outcome for each in verdicts.values())
        for outcome in ("PASSED", "FAILED", "ERROR", "SKIPPED")
    }
    summary = ", ".join(f"{number} {outcome.lower()}" for outcome, number in count.items() if number)
    if not verdicts:
        yield row("pytest -m gpu", "failed", "pytest reported no tests", output=text[-3000:])
        return
    if not count["PASSED"] and not count["FAILED"] and not count["ERROR"]:
        yield absent("pytest -m gpu", f"{summary or 'no test ran'}: no GPU")
        return
    bad = {name for name, outcome in verdicts.items() if outcome in ("FAILED", "ERROR")}
    yield row("pytest -m gpu", "failed" if bad else "passed", summary, counts=count)
    yield from (
        row(name.removeprefix("tests/"), "failed", reasons.get(name, "see the traceback")[:300])
        for name in sorted(bad)
    )
    if late:
        yield row("the rest of pytest -m gpu", "missing", f"did not finish within {limit:.0f} s")

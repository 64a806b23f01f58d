"""Cases of `tools/benchmark.py kernels`: each kernel at the shapes of real models, with its peers.

A case states the bytes or FLOPs that its operation requires, independent of the implementation. Its functions
are created right before they are measured, so that a failure to create one only affects its own line. Inputs
are random, because a matmul of zeros is a tenth faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megalite_kernels import activation, adamw, cross_entropy, dropout, grad_norm, norm, rotary
from torch import Tensor

from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.cross_entropy import CrossEntropy, loss_in_chunks
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue

Function = Callable[[], object]
EAGER, COMPILED, LIGER = "torch eager", "torch.compile", "Liger"
IGNORE = -100
EPS = 1e-5


@dataclass(frozen=True)
class Target:
    """A target of a case: `measure` of its row is at most, or at least, `bound`."""

    name: str
    measure: Callable[[dict[str, Any]], float | None]
    bound: float
    at_most: bool = True


@dataclass
class Contest:
    """Timed functions: ours, and factories of the peers."""

    ours: Function
    peers: dict[str, Callable[[], Function]] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelCase:
    """One operation at one shape."""

    kernel: str
    shape: str
    make: Callable[[], Contest]
    bytes: float = 0.0
    flops: float = 0.0
    targets: Sequence[Target] = ()
    module: str = ""  # of `megalite_kernels`
    tuned: tuple[str, ...] = ()  # kernels of the module that --tune tries other settings for


@dataclass(frozen=True)
class Sizes:
    """Sizes of cases: those of real models, or small ones for an interpreter."""

    device: str
    smoke: bool

    def of(self, real: int, smoke: int) -> int:
        return smoke if self.smoke else real

    def each(self, *real: int) -> Sequence[int]:
        return (64,) if self.smoke else real

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def tokens(self, count: int, vocabulary: int) -> Tensor:
        return torch.randint(vocabulary, (count,), device=self.device)


def times_limit(bound: float) -> Target:
    """Return a target for the time relative to moving the bytes at 0.9 × the data sheet's bandwidth."""
    return Target("time / limit", lambda row: row["times_limit"], bound)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, or the function itself without a GPU.

    Compiling for a CPU is slow, and its speed is irrelevant.
    """
    return torch.compile(function, dynamic=False) if torch.cuda.is_available() else function


def backward_of(forward: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Function:
    """Return the backward of one forward, which can run many times."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = forward(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


def both_ways(
    function: Callable[..., Any], inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> dict[str, Callable[[], Function]]:
    """Return torch's backward of a function, eager and compiled."""
    return {
        EAGER: lambda: backward_of(function, inputs, grads),
        COMPILED: lambda: backward_of(compiled(function), inputs, grads),
    }


def forwards(function: Callable[..., Any], inputs: Sequence[Tensor]) -> dict[str, Callable[[], Function]]:
    """Return torch's forward of a function, eager and compiled."""

    def run_compiled() -> Function:
        compiled_function = compiled(function)
        return lambda: compiled_function(*inputs)

    return {EAGER: lambda: lambda: function(*inputs), COMPILED: run_compiled}


# ---- cross-entropy


def _cross_entropy(sizes: Sizes) -> Iterable[KernelCase]:
    count, vocabulary = sizes.of(8192, 4), sizes.of(131072, 64)
    shape, logit = f"{count} × {vocabulary} bf16", count * vocabulary

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        return (
            sizes.randn(count, vocabulary),
            sizes.tokens(count, vocabulary),
            torch.full((), 1 / count, device=sizes.device),
        )

    def forward(logits: Tensor, targets: Tensor) -> Tensor:
        stats = cross_entropy.statistics(logits, targets, 0, vocabulary, IGNORE, False)
        return cross_entropy.combine(stats[None], targets, IGNORE, 0.0, 0.0, vocabulary)[1]

    def backward(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor) -> None:
        cross_entropy.gradient_(logits, targets, lse, scale, 0, vocabulary, IGNORE, 0.0, 0.0, vocabulary)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), targets)

    def torchs(function: Callable[..., Tensor], logits: Tensor, targets: Tensor) -> Function:
        leaf = logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(function(leaf, targets), leaf)

    def liger(logits: Tensor, targets: Tensor) -> Function:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        return torchs(LigerCrossEntropyLoss(), logits, targets)

    def make_both() -> Contest:
        logits, targets, scale = inputs()
        peers = {
            EAGER: lambda: torchs(loss, logits, targets),
            COMPILED: lambda: torchs(compiled(loss), logits, targets),
        }
        peers[LIGER] = lambda: liger(logits, targets)
        return Contest(lambda: backward(logits, targets, forward(logits, targets), scale), peers)

    def make_forward() -> Contest:
        logits, targets, _ = inputs()
        return Contest(
            lambda: cross_entropy.statistics(logits, targets, 0, vocabulary, IGNORE, False),
            forwards(loss, (logits, targets)),
        )

    def make_backward() -> Contest:
        logits, targets, scale = inputs()
        lse = forward(logits, targets)
        return Contest(lambda: backward(logits, targets, lse, scale))

    extra = Target(
        "extra memory / logits", lambda row: row["extra_bytes"] and row["extra_bytes"] / (2 * logit), 0.01
    )
    yield KernelCase(
        "cross-entropy, both ways", shape, make_both, bytes=6 * logit, targets=(times_limit(1.25), extra)
    )
    own = "cross_entropy_triton"
    yield KernelCase(
        "cross-entropy, forward", shape, make_forward, bytes=2 * logit, module=own, tuned=("_statistics",)
    )
    yield KernelCase(
        "cross-entropy, backward", shape, make_backward, bytes=4 * logit, module=own, tuned=("_gradient",)
    )


# ---- norms


def _norms(sizes: Sizes) -> Iterable[KernelCase]:
    count = sizes.of(16384, 4)
    for hidden in sizes.each(2048, 4096, 5120, 8192):
        yield from _norm(sizes, count, hidden)


def _norm(sizes: Sizes, count: int, hidden: int) -> Iterable[KernelCase]:
    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        return sizes.randn(count, hidden), sizes.randn(count, hidden), sizes.randn(hidden)

    def torchs(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + branch
        return total, F.rms_norm(total, (hidden,), weight, EPS)

    def liger(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        y, total = LigerFusedAddRMSNormFunction.apply(x, branch, weight, EPS, 0.0, "llama", False)
        return total, y

    def make_forward() -> Contest:
        x, branch, weight = inputs()
        peers = {**forwards(torchs, (x, branch, weight)), LIGER: lambda: lambda: liger(x, branch, weight)}
        return Contest(lambda: norm.add_rms_norm(x, branch, weight, EPS), peers)

    def make_backward() -> Contest:
        x, branch, weight = inputs()
        dtotal, dy = sizes.randn(count, hidden), sizes.randn(count, hidden)
        total, _, rstd = norm.add_rms_norm(x, branch, weight, EPS)
        own = (x, branch, weight), (dtotal, dy)
        peers = {**both_ways(torchs, *own), LIGER: lambda: backward_of(liger, *own)}
        return Contest(lambda: norm.rms_norm_backward(dy, total, weight, rstd, 0.0, dtotal), peers)

    shape, moved = f"{count} × {hidden} bf16", 8 * count * hidden
    forward, backward = (times_limit(1.15),), (times_limit(1.25),)
    yield KernelCase(
        "add + RMSNorm, forward",
        shape,
        make_forward,
        moved,
        targets=forward,
        module="norm_triton",
        tuned=("_forward",),
    )
    yield KernelCase(
        "add + RMSNorm, backward",
        shape,
        make_backward,
        moved,
        targets=backward,
        module="norm_triton",
        tuned=("_backward",),
    )


# ---- gated activation


def _swiglu(sizes: Sizes) -> Iterable[KernelCase]:
    count = sizes.of(8192, 4)
    for width in sizes.each(14336, 11008, 5632):
        yield from _swiglu_of(sizes, count, width)


def _swiglu_of(sizes: Sizes, count: int, width: int) -> Iterable[KernelCase]:
    def torchs(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def liger(gate_up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

        return LigerFusedGateUpSiLUMulFunction.apply(gate_up)

    def make_forward() -> Contest:
        gate_up = sizes.randn(count, 2 * width)
        peers = {**forwards(torchs, (gate_up,)), LIGER: lambda: lambda: liger(gate_up)}
        return Contest(lambda: activation.gated_forward(gate_up, "silu"), peers)

    def make_backward() -> Contest:
        gate_up, dh = sizes.randn(count, 2 * width), sizes.randn(count, width)
        peers = {**both_ways(torchs, (gate_up,), (dh,)), LIGER: lambda: backward_of(liger, (gate_up,), (dh,))}
        return Contest(lambda: activation.gated_backward(dh, gate_up, "silu"), peers)

    shape, module, element = f"{count} × {width} bf16", "activation_triton", count * width
    yield KernelCase(
        "SwiGLU, forward",
        shape,
        make_forward,
        6 * element,
        targets=(times_limit(1.10),),
        module=module,
        tuned=("_forward",),
    )
    yield KernelCase(
        "SwiGLU, backward",
        shape,
        make_backward,
        12 * element,
        targets=(times_limit(1.25),),
        module=module,
        tuned=("_backward",),
    )


# ---- rotary embedding


def _rotary(sizes: Sizes) -> Iterable[KernelCase]:
    length, query_heads, key_heads, dim = (
        sizes.of(8192, 4),
        sizes.of(32, 2),
        sizes.of(8, 1),
        sizes.of(128, 16),
    )
    heads = query_heads + 2 * key_heads

    def tables() -> tuple[Tensor, Tensor]:
        return rotary.rotary_tables(torch.arange(length), dim, 5e5, None, torch.bfloat16, sizes.device)

    def split(packed: Tensor) -> tuple[Tensor, ...]:
        return packed.unflatten(-1, (heads, dim)).split((query_heads, key_heads, key_heads), 2)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((second, first), -1) * sin  # the first half of the sines is negated

    def torchs(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split(packed)
        return turned(q, cos, sin), turned(k, cos, sin), v

    def liger(packed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        q, k, v = split(packed)
        unsigned = torch.cat((sin[..., dim // 2 :], sin[..., dim // 2 :]), -1)
        tables = (table.view(1, length, dim) for table in (cos, unsigned))
        q, k = liger_rotary_pos_emb(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), *tables)
        return q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3), v

    def make_forward() -> Contest:
        packed, (cos, sin) = sizes.randn(length, 1, heads * dim), tables()
        peers = {**forwards(torchs, (packed, cos, sin)), LIGER: lambda: lambda: liger(packed, cos, sin)}
        return Contest(lambda: rotary.split_rotary(packed, query_heads, key_heads, dim, cos, sin), peers)

    def make_backward() -> Contest:
        packed, (cos, sin) = sizes.randn(length, 1, heads * dim), tables()
        dq, dk, dv = (torch.randn_like(x) for x in split(packed))
        own = (packed,), (dq, dk, dv)
        peers = {
            **both_ways(lambda x: torchs(x, cos, sin), *own),
            LIGER: lambda: backward_of(lambda x: liger(x, cos, sin), *own),
        }
        return Contest(lambda: rotary.split_rotary_backward(dq, dk, dv, cos, sin), peers)

    shape, moved, module = (
        f"{length} × ({query_heads} + 2·{key_heads}) × {dim} bf16",
        4 * length * heads * dim,
        "rotary_triton",
    )
    yield KernelCase(
        "rotary + split, forward",
        shape,
        make_forward,
        moved,
        targets=(times_limit(1.15),),
        module=module,
        tuned=("_rotary",),
    )
    yield KernelCase(
        "rotary + split, backward",
        shape,
        make_backward,
        moved,
        targets=(times_limit(1.15),),
        module=module,
        tuned=("_rotary",),
    )


# ---- optimizer


def _adamw(sizes: Sizes) -> Iterable[KernelCase]:
    for dtype in (torch.float32, torch.bfloat16):
        yield _adamw_of(sizes, dtype)


def _adamw_of(sizes: Sizes, grad_dtype: torch.dtype) -> KernelCase:
    count = sizes.of(1_000_000_000, 4096)
    options = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

    def make() -> Contest:
        fp32 = torch.float32
        p, m, weight = sizes.randn(count, dtype=fp32), sizes.randn(count, dtype=fp32), sizes.randn(count)
        v, g = torch.rand_like(p), sizes.randn(count, dtype=grad_dtype)
        divisor, step = torch.full((), 2.0, device=sizes.device), torch.full((), 10.0, device=sizes.device)

        def torchs() -> None:
            """Clip as in clip_grad_norm_, run torch's fused AdamW, and round the weights."""
            g.div_(divisor)
            torch._fused_adamw_(
                [p], [g.float()], [m], [v], [], [step], **options, amsgrad=False, maximize=False
            )  # type: ignore[call-overload]
            weight.copy_(p)

        def formula(p: Tensor, g: Tensor, m: Tensor, v: Tensor, weight: Tensor, divisor: Tensor) -> None:
            g = g.float() / divisor
            m.lerp_(g, 1 - options["beta1"])
            v.lerp_(g * g, 1 - options["beta2"])
            update = m / (v.sqrt() * 1.1 + options["eps"])
            p.sub_(1e-5 * p + 1e-4 * update)
            weight.copy_(p)

        def run_compiled() -> Function:
            compiled_formula = compiled(formula)
            return lambda: compiled_formula(p, g, m, v, weight, divisor)

        def ours() -> None:
            adamw.adamw_([p], [g], [m], [v], [weight], step=10, grad_scale=divisor, **options)

        return Contest(ours, {EAGER: lambda: torchs, COMPILED: run_compiled})

    name = "fp32" if grad_dtype == torch.float32 else "bf16"
    moved = (26 + grad_dtype.itemsize) * count
    return KernelCase(
        "AdamW",
        f"{count:.3g} weights, {name} gradients",
        make,
        moved,
        targets=(times_limit(1.15),),
        module="adamw_triton",
        tuned=("_adamw",),
    )


def _grad_norm(sizes: Sizes) -> Iterable[KernelCase]:
    count = sizes.of(1_000_000_000, 4096)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):

        def make(dtype: torch.dtype = dtype) -> Contest:
            g = sizes.randn(count, dtype=dtype)

            def torchs(g: Tensor) -> Tensor:
                return torch.linalg.vector_norm(g, dtype=torch.float32)

            return Contest(lambda: grad_norm.squared_sum([g]), forwards(torchs, (g,)))

        shape, limit = f"{count:.3g} {name}", (times_limit(1.15),)
        module, tuned = "grad_norm_triton", ("_squared_sums",)
        yield KernelCase(
            "gradient norm", shape, make, dtype.itemsize * count, targets=limit, module=module, tuned=tuned
        )


# ---- dropout


def _dropout(sizes: Sizes) -> Iterable[KernelCase]:
    """Compare with torch's own dropout, whose masks depend on the layout."""
    count, width = sizes.of(8192, 4), sizes.of(4096, 64)

    def torchs(x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)

    def make() -> Contest:
        x, positions = sizes.randn(count, 1, width), torch.arange(count, device=sizes.device)
        samples = torch.zeros(1, dtype=torch.int64, device=sizes.device)
        return Contest(lambda: dropout.dropout(x, 7, samples, positions, 0.1), forwards(torchs, (x,)))

    shape, limit = f"{count} × {width} bf16", (times_limit(1.15),)
    yield KernelCase(
        "dropout", shape, make, 4 * count * width, targets=limit, module="dropout_triton", tuned=("_dropout",)
    )


# ---- the head with the loss


def _loss(sizes: Sizes) -> Iterable[KernelCase]:
    count, hidden, vocabulary = sizes.of(8192, 8), sizes.of(4096, 16), sizes.of(128256, 64)

    def torchs(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets)

    def step(function: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor) -> Function:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        return lambda: torch.autograd.grad(function(*leaves, targets), leaves)

    def liger(x: Tensor, weight: Tensor, targets: Tensor) -> Function:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        return step(lambda x, weight, targets: loss(weight, x, targets), x, weight, targets)

    def make() -> Contest:
        x, weight, targets = (
            sizes.randn(count, hidden),
            sizes.randn(vocabulary, hidden) / hidden**0.5,
            sizes.tokens(count, vocabulary),
        )
        peers = {
            EAGER: lambda: step(torchs, x, weight, targets),
            COMPILED: lambda: step(compiled(torchs), x, weight, targets),
            LIGER: lambda: liger(x, weight, targets),
        }
        if hasattr(F, "linear_cross_entropy"):
            peers["F.linear_cross_entropy"] = lambda: step(F.linear_cross_entropy, x, weight, targets)
        return Contest(_chunked_loss(x, weight, targets, sizes.of(4096, 4)), peers)

    def ratio(key: str) -> Callable[[dict[str, Any]], float | None]:
        def measure(row: dict[str, Any]) -> float | None:
            own, peer = row[key], row["peers"].get(COMPILED, {}).get(key)
            return own / peer if own is not None and peer else None

        return measure

    targets = (
        Target("time / torch.compile", ratio("us"), 1.10),
        Target("extra memory / torch.compile", ratio("extra_bytes"), 1 / 6),
    )
    shape = f"{count} × {hidden} × {vocabulary} bf16"
    yield KernelCase(
        "head + cross-entropy in chunks, both ways",
        shape,
        make,
        flops=6 * count * hidden * vocabulary,
        targets=targets,
    )


def _chunked_loss(x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Function:
    """Return the model's own head and loss.

    The weight gradient is accumulated in fp32, in a buffer allocated before the step.
    """
    tp = Mesh(Layout(pp=1, dp=1, cp=1, tp=1)).tp
    spec = ParamSpec("head.weight", 1, (Segment("head.weight", tuple(weight.shape)),))
    head = Weight(spec, weight.detach().requires_grad_(), torch.float32, WeightGradQueue())
    head.grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    project, loss = ColumnParallelLinear(head, None, tp, False), CrossEntropy(tp, weight.shape[0])
    leaf, by_position = x.detach().unsqueeze(1).requires_grad_(), targets.unsqueeze(1)

    def part(inputs: Tensor, its: Tensor, _: Tensor | None) -> Tensor:
        return loss(project(inputs).flatten(0, 1), its, 1 / len(targets))

    def step() -> None:
        head.begin_step(1, 1)
        torch.autograd.grad(loss_in_chunks(part, leaf, by_position, head, rows), leaf)

    return step


CASES: dict[str, Callable[[Sizes], Iterable[KernelCase]]] = {
    "cross_entropy": _cross_entropy,
    "norm": _norms,
    "adamw": _adamw,
    "grad_norm": _grad_norm,
    "swiglu": _swiglu,
    "dropout": _dropout,
    "rotary": _rotary,
    "loss": _loss,
}

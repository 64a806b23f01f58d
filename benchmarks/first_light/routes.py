"""Routes of attention, of the weight gradient's and the router's matmul; `fp8_routes` and `state_routes`.

They are checked against float64, then timed, and the fastest ones are written to a file. `kernels: auto`
reads the table (`megalite_kernels.device_routes`). Inaccurate routes are never written. Routes whose order of
additions varies between runs stay in the table, because a deterministic run rejects them itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megalite_kernels import attention_routes, backend, device_routes, router_logits, weight_grad
from megalite_kernels.attention_library import Options
from megalite_kernels.attention_routes import AttentionCall, Route
from torch import Tensor

from benchmarks import report
from benchmarks.first_light import fp8_routes, library, state_routes, values
from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from benchmarks.measure import timed, wait
from megalite.commands.parser import write_whole
from tests.kernels.accuracy import assert_as_accurate, truncated

Both = Callable[[], tuple[Tensor, ...]]
KINDS = ("plain", "documents")
LAST = ("fa3", "fa3_varlen")  # they replace FlashAttention-2 in the process


def path_of(scene: Scene) -> Path:
    """Return the path of the device's table. The table of a rehearsal is not used."""
    return (
        device_routes.path_of(scene.gpus[0])
        if scene.gpus
        else report.ROOT / "runs" / "first-light-rehearsal-routes.json"
    )


def table_of(scene: Scene) -> dict[str, Any]:
    """Return the current table of the device, or an empty dict."""
    path = path_of(scene)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rows(scene: Scene) -> Iterator[Row]:
    """Yield the rows. Untested routes, which may break the context of the device, come last."""
    torch.manual_seed(0)
    backend.select("triton" if scene.gpus else "torch")
    times: dict[str, dict[str, float]] = {}
    jobs = [partial(_weight_gradient, name, scene, times) for name in weight_grad.ROUTES]
    jobs += [partial(_router, name, scene, times) for name in router_logits.ROUTES]
    jobs += fp8_routes.jobs(scene, times, milliseconds)  # type: ignore[arg-type]
    jobs += state_routes.jobs(scene, times, milliseconds)  # type: ignore[arg-type]
    for route in sorted(attention_routes.ROUTES, key=lambda route: (route.guarded, route.name in LAST)):
        kinds = [kind for kind in KINDS if route.for_documents in (None, kind == "documents")]
        jobs += [partial(_attention, route, kind, scene, times) for kind in kinds]
    for job in jobs:
        yield from job()
        if scene.gpus and (lost := _context_lost()):
            yield row("the routes that follow", "missing", f"the device context was lost: {lost}")
            break
    backend.select("torch")
    yield guarded("the table of routes", "measurement", partial(_write, times, scene))
    yield from library.rows(scene)


def _context_lost() -> str | None:
    """Return the reason why nothing more can be computed in this process, or None."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _write(ms: dict[str, dict[str, float]], scene: Scene) -> Row:
    """Write the fastest route of each kind. Kinds that could not be measured keep the default order."""
    best = {kind: min(times, key=times.__getitem__) for kind, times in ms.items() if times}
    table = {"attention": {kind: best[kind] for kind in KINDS if kind in best}}
    table |= {kind: best[kind] for kind in device_routes.KINDS if kind in best}  # type: ignore[misc]
    if not best:
        raise RuntimeError("could not measure any route")
    path = path_of(scene)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = {"ms": ms, "versions": report.versions(), "device": scene.gpus[0] if scene.gpus else None}
    write_whole(path, json.dumps({**table, "measured": measured}, indent=1) + "\n")
    listed = ", ".join(f"{kind} {name} ({ms[kind][name]:.2f} ms)" for kind, name in best.items())
    return row("the table of routes", "measured", f"{listed}: {path.relative_to(report.ROOT)}", **table)


# ---- attention


def _inputs(length: int, batch: int, heads: tuple[int, int], dim: int, scene: Scene) -> tuple[Tensor, ...]:
    """Return q, k and v as views of one packed projection, as in the model, and the output gradient."""
    dtype = torch.float32 if scene.rehearse else torch.bfloat16
    q, kv = heads
    packed = torch.randn(length, batch, q + 2 * kv, dim, device=scene.device, dtype=torch.float32).to(dtype)
    return *packed.split((q, kv, kv), 2), torch.randn(
        length, batch, q, dim, device=scene.device, dtype=torch.float32
    ).to(dtype)


def _documents(length: int, batch: int, document: int, device: str) -> tuple[Tensor, tuple[Tensor, int]]:
    """Return the start of each token's document, [length, batch], and the boundaries over all rows."""
    starts = (
        (torch.arange(length, device=device) // document * document)
        .unsqueeze(1)
        .expand(-1, batch)
        .contiguous()
    )
    ends = [
        min(first + document, length) + length * each
        for each in range(batch)
        for first in range(0, length, document)
    ]
    return starts, (torch.tensor([0, *ends], dtype=torch.int32, device=device), document)


def _attention(route: Route, kind: str, scene: Scene, times: dict[str, dict[str, float]]) -> Iterator[Row]:
    name = f"attention {kind}, {route.name}"
    if scene.rehearse and route.name != "reference":
        yield absent(name, "requires a GPU")
        return
    if scene.gpus and route.name == "reference":
        return  # far slower, and with memory for the scores
    proof: Row = {}
    small = (
        scene.sized(512, 32),
        2,
        (scene.sized(8, 2), scene.sized(2, 1)),
        scene.sized(128, 16),
        scene.sized(200, 12),
    )
    large = (
        scene.sized(8192, 64),
        scene.sized(2, 1),
        (scene.sized(32, 2), scene.sized(8, 1)),
        scene.sized(128, 16),
        scene.sized(2048, 16),
    )
    if (reason := _refusal(route, kind, large, scene)) is not None:
        yield absent(name, reason)
        return
    yield (
        proof := guarded(
            f"{name}: values", "proof", partial(_accurate, route, kind, small, scene, f"{name}: values")
        )
    )
    if proof["verdict"] == "passed":
        yield guarded(name, "measurement", partial(_timed, route, kind, large, scene, times, name))


Sizes = tuple[int, int, tuple[int, int], int, int]
"""Length, batch, (query heads, key-value heads), channels of a head, tokens of a document."""


def _refusal(route: Route, kind: str, sizes: Sizes, scene: Scene) -> str | None:
    if not scene.gpus:
        return None
    length, batch, heads, dim, _ = sizes
    q, k, v, _ = _inputs(length, batch, heads, dim, scene)
    documents = kind == "documents"
    return route.rejection(AttentionCall(q, k, v, documents=documents, boundaries=documents))


def _call(
    route: Route, given: tuple[Tensor, ...], starts: Tensor | None, boundaries: tuple[Tensor, int] | None
) -> tuple[Both, Both]:
    """Return functions for forward, and for forward with backward, of a route."""
    q, k, v, dout = given
    scale = q.shape[-1] ** -0.5
    if route.calls is not None:
        route.calls.prepare()
        calls, options = route.calls, Options(scale, None, boundaries)

        def forward() -> tuple[Tensor, ...]:
            return (calls.forward(q, k, v, options)[0],)

        def both() -> tuple[Tensor, ...]:
            out, saved = calls.forward(q, k, v, options)
            return out, *calls.backward(dout, q, k, v, out, saved, options)

        return forward, both
    if route.name == "triton":
        from megalite_kernels import attention_triton

        own = scale, None, starts, None, None, 0, 0.0, 0, 0

        def flash() -> tuple[Tensor, ...]:
            return (attention_triton.flash_attention(q, k, v, *own)[0],)

        def flash_both() -> tuple[Tensor, ...]:
            out, lse = attention_triton.flash_attention(q, k, v, *own)
            return out, *attention_triton.flash_attention_backward(dout, q, k, v, out, lse, *own)

        return flash, flash_both

    def reference() -> tuple[Tensor, ...]:
        return tuple(values._attention(q, k, v, dout, *([] if starts is None else [starts])))

    return reference, reference


def _made(route: Route, kind: str, sizes: Sizes, scene: Scene) -> tuple[Both, Both, tuple[Tensor, ...]]:
    length, batch, heads, dim, document = sizes
    given = _inputs(length, batch, heads, dim, scene)
    starts, boundaries = _documents(length, batch, document, scene.device)
    forward, both = _call(route, given, *((starts, boundaries) if kind == "documents" else (None, None)))
    return forward, both, (*given, *([starts] if kind == "documents" else []))


def _accurate(route: Route, kind: str, sizes: Sizes, scene: Scene, name: str) -> Row:
    """Check that the error against float64 is close to that of the reference in the same precision.

    Whether two runs are bitwise equal is also reported.
    """
    _, both, host = _made(route, kind, sizes, scene)
    exact = values._attention_by_definition(*(x.double() if x.is_floating_point() else x for x in host))
    theirs = values._attention_by_definition(*host)
    got = both()
    for one, true, near in zip(got, exact, theirs, strict=True):
        assert_as_accurate(one, true, near)
    alike = all(torch.equal(a, b) for _ in range(3) for a, b in zip(got, both(), strict=True))
    return row(
        name, "passed", "bitwise equal in four runs" if alike else "differs between runs", equal_bits=alike
    )


def _timed(
    route: Route, kind: str, sizes: Sizes, scene: Scene, times: dict[str, dict[str, float]], name: str
) -> Row:
    forward, both, _ = _made(route, kind, sizes, scene)
    first, whole = milliseconds(forward, scene), milliseconds(both, scene)
    length, batch, heads, dim, document = sizes
    reach = document if kind == "documents" else length
    flops = 4.0 * batch * heads[0] * dim * length * (reach + 1) / 2
    times.setdefault(kind, {})[route.name] = whole
    detail = (
        f"forward {first:.2f} ms, {flops / first / 1e9:,.0f} TFLOP/s; both ways {whole:.2f} ms, "
        f"{3.5 * flops / whole / 1e9:,.0f} TFLOP/s"
    )
    return row(name, "measured", detail, forward_ms=first, both_ms=whole, tflops=3.5 * flops / whole / 1e9)


def milliseconds(act: Callable[[], object], scene: Scene) -> float:
    """Return the median milliseconds of a call."""
    if scene.gpus:
        import triton

        return float(triton.testing.do_bench(act, warmup=15, rep=60, return_mode="median"))
    return 1e3 * min(timed(act, 1, 3))


# ---- the weight gradient's matmul


def _weight_gradient(route: str, scene: Scene, times: dict[str, dict[str, float]]) -> Iterator[Row]:
    name = f"weight gradient, {route}"
    if scene.rehearse:
        yield absent(name, "16-bit matmuls with fp32 output require a GPU")
        return
    yield (
        proof := guarded(
            f"{name}: values", "proof", partial(_matmul_is_exact, route, scene, f"{name}: values")
        )
    )
    if proof["verdict"] == "passed":
        yield guarded(name, "measurement", partial(_matmul_timed, route, scene, times, name))


def _matmul_is_exact(route: str, scene: Scene, name: str) -> Row:
    """Check two additions to an accumulator with undefined content against fp32 matmuls.

    The sums may be truncated, as tensor cores do.
    """
    tokens = 777
    left, inputs = (torch.randn(tokens, width, device=scene.device).bfloat16() for width in (512, 384))
    grad = torch.full((512, 384), torch.nan, device=scene.device)
    for overwrite in (True, False):
        weight_grad.ROUTES[route](grad, left.t(), inputs, overwrite)
    exact, in_fp32 = (2 * (left.to(dtype).t() @ inputs.to(dtype)) for dtype in (torch.float64, torch.float32))
    assert_as_accurate(grad, exact, in_fp32, truncated(tokens, grad))
    return row(name, "passed")


def _matmul_timed(route: str, scene: Scene, times: dict[str, dict[str, float]], name: str) -> Row:
    tokens, outputs, width = 16384, 14336, 4096
    left, inputs = (
        torch.randn(tokens, size, device=scene.device, dtype=torch.bfloat16) for size in (outputs, width)
    )
    grad = torch.zeros(outputs, width, device=scene.device)
    ms = milliseconds(lambda: weight_grad.ROUTES[route](grad, left.t(), inputs, False), scene)
    wait(scene.device)
    times.setdefault("weight_grad", {})[route] = ms
    tflops = 2 * tokens * outputs * width / ms / 1e9
    return row(name, "measured", f"{ms:.2f} ms, {tflops:,.0f} TFLOP/s", ms=ms, tflops=tflops)


# ---- a router's matmul


def _router(route: str, scene: Scene, times: dict[str, dict[str, float]]) -> Iterator[Row]:
    name = f"router, {route}"
    if scene.rehearse and route == "out_dtype":
        yield absent(name, "16-bit matmuls with fp32 output require a GPU")
        return
    yield (
        proof := guarded(
            f"{name}: values", "proof", partial(_logits_are_exact, route, scene, f"{name}: values")
        )
    )
    if proof["verdict"] == "passed":
        yield guarded(name, "measurement", partial(_logits_timed, route, scene, times, name))


def _logits_are_exact(route: str, scene: Scene, name: str) -> Row:
    """Check that the error against float64 is close to that of fp32 matmuls, or of truncated sums."""
    width = 2048
    rows, weight = (torch.randn(count, width, device=scene.device).bfloat16() for count in (777, 96))
    logits = router_logits.ROUTES[route](rows, weight)
    exact, in_fp32 = (rows.to(dtype) @ weight.to(dtype).t() for dtype in (torch.float64, torch.float32))
    assert_as_accurate(logits, exact, in_fp32, truncated(width, logits))
    return row(name, "passed")


def _logits_timed(route: str, scene: Scene, times: dict[str, dict[str, float]], name: str) -> Row:
    """Time the logits of DeepSeek-V3."""
    tokens, experts, width = scene.sized(8192, 64), scene.sized(256, 8), scene.sized(7168, 64)
    rows, weight = (
        torch.randn(count, width, device=scene.device, dtype=torch.bfloat16) for count in (tokens, experts)
    )
    ms = milliseconds(lambda: router_logits.ROUTES[route](rows, weight), scene)
    wait(scene.device)
    times.setdefault("router", {})[route] = ms
    return row(
        name, "measured", f"{ms:.3f} ms, {2 * tokens * experts * width / ms / 1e9:,.0f} TFLOP/s", ms=ms
    )

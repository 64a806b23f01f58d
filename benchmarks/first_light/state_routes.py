"""Routes of recurrences and convolutions: Triton's kernels, and packages that are installed.

A package's values may be as far from float64 as those of the Triton kernel. Then both are timed, forward with
backward, and the fastest is written to the table of routes (`routes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from megalite_kernels import causal_conv, recurrence, state_library
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from benchmarks.first_light.rows import Row, Scene, absent, guarded, row
from tests.kernels.accuracy import assert_as_accurate

Results = tuple[Tensor, ...]
Clock = Callable[[Callable[[], object], Scene], float]
"""Returns the milliseconds of a call."""
TAPS = 4


class TimedSizes(NamedTuple):
    """Sizes of a recurrence; of the convolution `dv` · `heads` are its channels."""

    keys: int
    heads: int
    dk: int
    dv: int

    def few(self, scene: Scene) -> TimedSizes:
        """Return the sizes with few heads, for float64; of a rehearsal they are narrow, too."""
        dk, dv = (min(width, scene.sized(width, 16)) for width in self[2:])
        return TimedSizes(min(self.keys, 2), min(self.heads, 2 * self.keys, 4), dk, dv)


SIZES = {
    "delta": TimedSizes(16, 32, 128, 128),  # Qwen3-Next
    "channel": TimedSizes(32, 32, 128, 128),  # Kimi Linear
    "scan": TimedSizes(8, 128, 128, 64),  # Nemotron-H
    "convolution": TimedSizes(1, 64, 1, 128),
}


class StateCall(NamedTuple):
    """The inputs of a call, with the gradient of its output."""

    inputs: tuple[Tensor, ...]
    dout: Tensor

    def to(self, dtype: torch.dtype) -> StateCall:
        return StateCall(tuple(x.to(dtype) for x in self.inputs), self.dout.to(dtype))


def jobs(scene: Scene, times: dict[str, dict[str, float]], clock: Clock) -> list[Callable[[], Iterator[Row]]]:
    """Return functions that yield the rows of each route."""
    return [
        partial(route_rows, kind, route, scene, times, clock)
        for kind, routes in state_library.ROUTES.items()
        for route in routes
    ]


def route_rows(
    kind: str, route: str, scene: Scene, times: dict[str, dict[str, float]], clock: Clock
) -> Iterator[Row]:
    """Yield the rows of one route, and add its milliseconds to `times`."""
    name = f"{kind}, {route}"
    if scene.rehearse and route == "triton":
        yield absent(name, "requires a GPU")
        return
    few = SIZES[kind].few(scene)
    large = (300, few) if scene.rehearse else (8192, SIZES[kind])
    if route != "triton":
        if (reason := _refusal(kind, _call(kind, 300, few, scene))) is not None:
            yield absent(name, reason)
            return
        proof = partial(_accurate, kind, few, scene, f"{name}: values")
        yield (shown := guarded(f"{name}: values", "proof", proof))
        if shown["verdict"] != "passed":
            return
    call = _call(kind, *large, scene)
    yield guarded(name, "measurement", partial(_timed, kind, route, call, scene, times, clock))


def _call(kind: str, length: int, sizes: TimedSizes, scene: Scene) -> StateCall:
    keys, heads, dk, dv = sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, 1, *shape, device=scene.device).bfloat16()

    if kind == "convolution":
        weight = torch.randn(heads * dv, TAPS, device=scene.device).bfloat16()
        return StateCall((normal(heads * dv), weight), normal(heads * dv))
    q, k = (torch.nn.functional.normalize(normal(keys, dk).float(), dim=-1).bfloat16() for _ in range(2))
    decays = (heads, dk) if kind == "channel" else (heads,)
    g = -torch.rand(length, 1, *decays, device=scene.device)
    beta = () if kind == "scan" else (torch.rand(length, 1, heads, device=scene.device),)
    return StateCall((q, k, normal(heads, dv), g, *beta), normal(heads, dv))


def _refusal(kind: str, call: StateCall) -> str | None:
    if kind == "convolution":
        x, weight = call.inputs
        return state_library.refuses_convolution(x, weight, has_halo=False)
    return state_library.refuses(Tokens(*call.inputs))


def _both(kind: str, package: bool, call: StateCall) -> Results:
    """Return the output and the gradients."""
    if kind == "convolution":
        x, weight = call.inputs
        if package:
            out = state_library.convolve(x, weight, None, None, True)
            of_inputs = state_library.convolve_backward(call.dout, x, weight, None, None, True)
        else:
            out, of_inputs = causal_conv.forward(x, weight), causal_conv.backward(call.dout, x, weight)
        return out, of_inputs.x, of_inputs.weight
    tokens = Tokens(*call.inputs)
    if package:
        out, _ = state_library.recur(tokens, None)
        gradients = state_library.recur_backward(call.dout, tokens, None, None)
    else:
        (out, _), gradients = recurrence.forward(tokens), recurrence.backward(call.dout, tokens)
    return (out, *(x for x in gradients[:5] if x is not None))


def _accurate(kind: str, sizes: TimedSizes, scene: Scene, name: str) -> Row:
    call = _call(kind, 300, sizes, scene)
    exact = _both(kind, False, call.to(torch.float64))
    for got, true, tritons in zip(_both(kind, True, call), exact, _both(kind, False, call), strict=True):
        assert_as_accurate(got, true, tritons)
    return row(name, "passed")


def _timed(
    kind: str,
    route: str,
    call: StateCall,
    scene: Scene,
    times: dict[str, dict[str, float]],
    clock: Clock,
) -> Row:
    ms = clock(lambda: _both(kind, route != "triton", call), scene)
    times.setdefault(kind, {})[route] = ms
    return row(f"{kind}, {route}", "measured", f"both ways {ms:.2f} ms", ms=ms)

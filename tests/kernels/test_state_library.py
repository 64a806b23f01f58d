"""Routes of recurrences and convolutions to installed packages: which calls they take, and how these are made.

Stand-ins for the packages compute with plain torch; the packages themselves need a GPU (`megalite first-light`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from megalite_kernels import causal_conv, device_routes, recurrence, state_library
from megalite_kernels.causal_conv import Halo
from megalite_kernels.recurrence import Tokens
from torch import Tensor

from benchmarks.first_light import state_routes
from benchmarks.first_light.rows import Scene
from tests.kernels.test_recurrence import DK, DV, step_by_step

CHANNELS, LENGTH, BATCH = 16, 21, 2


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the packages, named by the device's file; the functions that were called."""
    calls: list[str] = []

    def recur(name: str) -> Any:
        def function(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor, **options: Any
        ) -> tuple[Tensor, Tensor]:
            """As fla: [batch, seq, …], and an initial state whose gradient is known."""
            calls.append(name)
            assert options.pop("scale") == 1.0 and options.pop("output_final_state")
            initial = options.pop("initial_state")
            assert not options and (name != "chunk_simple_gla" or k.shape[2] == v.shape[2])
            rows = [x.transpose(0, 1).double() for x in (q, k, v, g, *beta)]
            size = v.shape[0], v.shape[2], k.shape[3], v.shape[3]
            start = torch.zeros(size, dtype=torch.float64) if initial is None else initial.double()
            out, final = step_by_step(Tokens(*rows), start)
            return out.transpose(0, 1).to(v.dtype), final.float()

        return function

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None, activation: str | None
    ) -> Tensor:
        """As causal_conv1d: [batch, channels, seq] with channels next to each other."""
        calls.append("causal_conv1d_fn")
        assert x.stride(1) == 1 and weight.dtype == torch.float32
        assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (x.shape[0], x.shape[2]))
        out, width = torch.zeros_like(x, dtype=torch.float64), weight.shape[1]
        for tap in range(width):
            past = width - 1 - tap
            moved = torch.nn.functional.pad(x.double(), (past, 0))[..., : x.shape[2]]
            if seq_idx is not None:
                moved = (
                    moved * (torch.nn.functional.pad(seq_idx, (past, 0), value=-1)[:, : x.shape[2]] == seq_idx)[:, None]
                )
            out = out + moved * weight[:, tap, None]
        out = out if bias is None else out + bias[:, None]
        return (torch.nn.functional.silu(out) if activation == "silu" else out).to(x.dtype)

    for module, name in state_library.FLA.values():
        monkeypatch.setitem(sys.modules, module, standing := ModuleType(module))
        setattr(standing, name, recur(name))
    monkeypatch.setitem(sys.modules, "causal_conv1d", standing := ModuleType("causal_conv1d"))
    standing.causal_conv1d_fn = convolve  # type: ignore[attr-defined]
    monkeypatch.setattr(state_library, "_missing", lambda package: None)
    named = {kind: routes[1] for kind, routes in state_library.ROUTES.items()}
    monkeypatch.setattr(state_library, "measured", lambda device: device_routes.DeviceRoutes("a", **named))
    return calls


def tokens_of(kind: str, dtype: torch.dtype = torch.bfloat16) -> Tokens:
    q, k = (torch.randn(LENGTH, BATCH, 2, DK).to(dtype) * 0.4 for _ in range(2))
    v = torch.randn(LENGTH, BATCH, 4, DV).to(dtype)
    g = -torch.rand(LENGTH, BATCH, 4, *([DK] if kind == "channel" else []))
    return Tokens(q, k, v, g, None if kind == "scan" else torch.rand(LENGTH, BATCH, 4))


@pytest.mark.parametrize("continued", [False, True], ids=["from zero", "continued"])
@pytest.mark.parametrize("kind", state_library.FLA)
def test_a_recurrence_is_the_packages(kind: str, continued: bool, installed: list[str]) -> None:
    tokens, initial = tokens_of(kind), torch.randn(BATCH, 4, DK, DV) if continued else None
    dout, dfinal = torch.randn(LENGTH, BATCH, 4, DV).bfloat16(), torch.randn(BATCH, 4, DK, DV) if continued else None
    out, final = recurrence.forward(tokens, initial)
    gradients = recurrence.backward(dout, tokens, initial, dfinal)
    assert installed == [state_library.FLA[kind][1]] * 2
    exact = tokens._replace(starts=torch.zeros(LENGTH, 1, dtype=torch.long) - 1)  # which the package does not take
    if not continued:
        exact = exact._replace(starts=torch.zeros(LENGTH, 1, dtype=torch.long))
    expected = recurrence.forward(exact, initial)
    torch.testing.assert_close((out, final), expected, rtol=1e-2, atol=1e-3)
    for own, reference in zip(gradients, recurrence.backward(dout, exact, initial, dfinal), strict=True):
        assert (own is None) == (reference is None)
        if own is not None and not (own is gradients.initial and not continued):
            assert own.dtype == reference.dtype and own.shape == reference.shape
            assert (own - reference).abs().max() <= 1e-2 * reference.abs().max()
    assert len(installed) == 2


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias, SiLU"])
def test_a_convolution_is_the_packages(bias: bool, documents: bool, installed: list[str]) -> None:
    x, dout = torch.randn(2, LENGTH, BATCH, CHANNELS).bfloat16()
    weight, added = torch.randn(CHANNELS, 4).bfloat16(), torch.randn(CHANNELS).bfloat16() if bias else None
    starts = (torch.arange(LENGTH) // 5 * 5).unsqueeze(1) if documents else None
    out = causal_conv.forward(x, weight, added, starts=starts, silu=bias)
    gradients = causal_conv.backward(dout, x, weight, added, starts=starts, silu=bias)
    assert installed == ["causal_conv1d_fn"] * 2
    halo = Halo(x.new_zeros(3, BATCH, CHANNELS))  # which the package does not take
    expected = causal_conv.forward(x, weight, added, starts=starts, halo=halo, silu=bias)
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    references = causal_conv.backward(dout, x, weight, added, starts=starts, halo=halo, silu=bias)
    for name in ("x", "weight", "bias"):
        own, reference = getattr(gradients, name), getattr(references, name)
        assert (own is None) == (reference is None)
        if own is not None:
            assert own.dtype == reference.dtype
            assert (own - reference).abs().max() <= 1e-2 * reference.abs().max()
    assert len(installed) == 2


def test_other_calls_go_elsewhere(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, starts = tokens_of("delta"), torch.zeros(LENGTH, 1, dtype=torch.long)
    recurrence.forward(tokens._replace(starts=starts))
    recurrence.forward(tokens_of("delta", torch.float32))
    recurrence.forward(tokens_of("delta", torch.float64))
    x, weight = torch.randn(LENGTH, BATCH, CHANNELS).bfloat16(), torch.randn(CHANNELS, 5).bfloat16()
    causal_conv.forward(x, weight)
    causal_conv.forward(x[..., :12], weight[:12, :4])
    causal_conv.forward(x.float(), weight[:, :4])
    with monkeypatch.context() as patched:
        patched.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        recurrence.forward(tokens)
        causal_conv.forward(x, weight[:, :4])
    with monkeypatch.context() as patched:
        patched.setattr(state_library, "_missing", lambda package: f"{package} is not installed")
        recurrence.forward(tokens)
        causal_conv.forward(x, weight[:, :4])
    with monkeypatch.context() as patched:  # nothing was measured
        patched.setattr(state_library, "measured", lambda device: device_routes.DeviceRoutes())
        recurrence.forward(tokens)
        causal_conv.forward(x, weight[:, :4])
    assert installed == []


def test_first_light_compares_and_times_what_is_installed(installed: list[str]) -> None:
    def clock(call: Callable[[], object], scene: Scene) -> float:
        call()
        return 1.0

    times: dict[str, dict[str, float]] = {}
    scene = Scene((), True, True, time.monotonic() + 100, {})
    for kind, (_, package) in state_library.ROUTES.items():
        rows = list(state_routes.route_rows(kind, package, scene, times, clock))
        verdicts = [each["verdict"] for each in rows]
        assert verdicts == ["passed", "measured"], rows
        assert times[kind] == {package: 1.0}
    assert set(installed) == {"causal_conv1d_fn", *(name for _, name in state_library.FLA.values())}


def test_a_file_may_name_them(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_routes, "DIRECTORY", tmp_path)
    device_routes.path_of("A GPU").write_text('{"delta": "fla", "convolution": "causal_conv1d"}')
    routes = device_routes.read("A GPU")
    assert (routes.delta, routes.scan, routes.convolution, routes.problem) == ("fla", None, "causal_conv1d", None)
    device_routes.path_of("A GPU").write_text('{"scan": "mamba_ssm"}')
    assert "scan = mamba_ssm: no such route" in (device_routes.read("A GPU").problem or "")

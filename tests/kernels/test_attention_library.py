"""Which implementation attention takes on a GPU, and the calls of those that come with torch; their values need a
GPU."""

import json
from pathlib import Path

import pytest
import torch
from megalite_kernels import attention as module
from megalite_kernels import attention_library, attention_routes, backend, device_routes
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.attention_routes import BY_NAME, ROUTES, AttentionCall
from megalite_kernels.dropout import AttentionDropout
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.data.document_boundaries import boundaries
from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_attention import autograd, inputs

NONE = {"window": None, "document_start": None, "softcap": None, "dropout": None, "boundaries": None}
KNOWN = {"document_start": torch.zeros(128, 2), "boundaries": (torch.tensor([0, 128, 256], dtype=torch.int32), 128)}


@pytest.fixture
def can_use(monkeypatch):
    """What torch says that it can run, on what, and what was measured there: set by a test, as no GPU may be there to
    ask."""
    can = {
        "cudnn": True,
        "flash": True,
        "architecture": "sm_90",
        "triton": True,
        "measured": device_routes.DeviceRoutes(),
    }
    monkeypatch.setattr(attention_routes.cuda, "can_use_cudnn_attention", lambda parameters: can["cudnn"])
    monkeypatch.setattr(attention_routes.cuda, "can_use_flash_attention", lambda parameters: can["flash"])
    monkeypatch.setattr(attention_routes, "architecture", lambda device: can["architecture"])
    monkeypatch.setattr(attention_routes, "takes_triton", lambda x: can["triton"])
    monkeypatch.setattr(attention_routes, "measured", lambda device: can["measured"])
    return can


def fake(sequence=128, batch=2, heads=4, kv_heads=2, dim=64, dtype=torch.bfloat16):
    return tuple(
        torch.empty(sequence, batch, count, dim, dtype=dtype, device="cuda") for count in (heads, kv_heads, kv_heads)
    )


def routed(sizes=None, **options):
    with FakeTensorMode():
        return module._route(*fake(**(sizes or {})), **NONE | options)


@pytest.mark.parametrize(
    "can, expected",
    [
        ({}, "cudnn"),
        ({"architecture": "sm_80"}, "flash"),
        ({"cudnn": False}, "flash"),
        ({"cudnn": False, "flash": False}, "triton"),
        ({"cudnn": False, "flash": False, "triton": False}, "reference"),
    ],
)
def test_cudnn_on_hopper_else_flash_where_torch_can(can, expected, can_use):
    can_use |= can
    assert routed() == expected


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"dim": 128}, "cudnn"),
        ({"dim": 160}, "flash"),  # cuDNN may have a forward pass for it, and no backward pass
        # older versions read what lies behind such a sequence, newer ones have returned NaN for dq
        ({"sequence": 200}, "flash"),
        ({"sequence": 256}, "cudnn"),
        ({"dim": 12}, "triton"),
        ({"dim": 264}, "reference"),
        ({"dtype": torch.float32}, "reference"),  # Triton's products would not use tensor cores
        ({"sequence": 0}, "triton"),
        ({"batch": 0}, "triton"),
    ],
    ids=str,
)
def test_what_torch_would_refuse_or_get_wrong_when_called_directly(sizes, expected, can_use):
    assert routed(sizes) == expected


def test_not_on_the_cpu_nor_in_a_deterministic_run(can_use, monkeypatch):
    assert module._route(*(torch.ones(4, 1, 1, 8) for _ in range(3)), **NONE) == "short"
    assert module._route(*(torch.ones(65, 1, 1, 8) for _ in range(3)), **NONE) == "reference"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    can_use["measured"] = device_routes.DeviceRoutes("a", plain="flash", documents="flash_varlen")
    assert routed() == routed(**KNOWN) == "triton"


@pytest.mark.parametrize(
    "options",
    [{"window": 8}, KNOWN, {"softcap": 30.0}, {"dropout": AttentionDropout(1, torch.arange(2), 0.1)}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_what_they_do_not_know_goes_elsewhere(options, kernels, can_use):
    can_use["triton"] = kernels == "triton"
    assert routed(**options) == kernels
    assert routed() == "cudnn"


@pytest.mark.parametrize("route", [route for route in ROUTES if route.for_documents], ids=lambda route: route.name)
def test_documents_take_a_guarded_route_only_where_it_was_measured_to_be_the_fastest(route, can_use, monkeypatch):
    monkeypatch.setattr(attention_routes.importlib.util, "find_spec", lambda name: name)
    attention_routes._fa3_missing.cache_clear()
    can_use["measured"] = device_routes.DeviceRoutes("a", documents=route.name)
    assert routed(**KNOWN) == route.name and routed() == "cudnn"
    assert routed(**KNOWN, softcap=30.0) == "triton"
    assert routed(**KNOWN | {"boundaries": None}) == "triton"
    assert routed(**KNOWN, window=8) == (route.name if route.windows else "triton")
    attention_routes._fa3_missing.cache_clear()


def test_why_a_route_runs_is_said_in_one_line(can_use):
    with FakeTensorMode():
        q, k, v = fake(sequence=200)
        assert attention_routes.describe(AttentionCall(q, k, v)) == (
            "attention: flash; not cudnn (200 positions are no multiple of 128); no routes were measured on this device"
        )
        can_use["measured"] = device_routes.DeviceRoutes("NVIDIA X", plain="flash", documents="fa3_varlen")
        assert (
            attention_routes.describe(AttentionCall(q, k, v))
            == "attention: flash, measured to be the fastest on NVIDIA X"
        )
        (line,) = attention_routes.describe(AttentionCall(q, k, v, documents=True, boundaries=True)).splitlines()
    assert line.startswith("attention with documents: triton; not fa3_varlen (")


# ---- the file of a device


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(device_routes, "DIRECTORY", tmp_path)
    return tmp_path / "nvidia-h100-80gb-hbm3.json"


def test_the_routes_of_a_device_are_read(file, monkeypatch):
    file.write_text(
        json.dumps(
            {"attention": {"plain": "flash", "documents": "flash_varlen"}, "weight_grad": "mm_add", "router": "cast"}
        )
    )
    routes = device_routes.read("NVIDIA H100 80GB HBM3")
    assert routes == device_routes.DeviceRoutes("NVIDIA H100 80GB HBM3", "flash", "flash_varlen", "mm_add", "cast")
    assert device_routes.read("another") == device_routes.DeviceRoutes("another")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    for kernels, counts in (("auto", True), ("torch", False)):
        backend.select(kernels)
        device_routes._of_device.cache_clear()
        assert (device_routes.measured(torch.device("cuda:0")) == routes) == counts
    device_routes._of_device.cache_clear()
    assert device_routes.measured(torch.device("cpu")) == device_routes.DeviceRoutes()


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"attention": {"plain": "flash_varlen"}}', "has plain = flash_varlen: no such route"),  # it is for documents
        ('{"attention": {"documents": "cudnn"}}', "has documents = cudnn: no such route"),
        ('{"weight_grad": "cublas"}', "has weight_grad = cublas: no such route"),
        ('{"router": "addmm"}', "has router = addmm: no such route"),
        ("[1]", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_changes_nothing_and_is_named(text, words, file):
    file.write_text(text)
    routes = device_routes.read("NVIDIA H100 80GB HBM3")
    assert routes == device_routes.DeviceRoutes("NVIDIA H100 80GB HBM3", problem=routes.problem) and words in str(
        routes.problem
    )


# ---- the calls


@pytest.mark.parametrize("chosen", ["cudnn", "flash"])
def test_their_signatures(chosen, can_use):
    """Shapes alone: as torch's own description of them has it."""
    can_use |= {"cudnn": chosen == "cudnn"}
    with FakeTensorMode():
        q, k, v = fake()
        out, saved = attention(q, k, v, scale=0.1)
        gradients = attention_backward(torch.empty_like(out), q, k, v, out, saved, scale=0.1)
        assert [x.shape for x in (out, *gradients)] == [x.shape for x in (q, q, k, v)]
        assert all(x.is_contiguous() for x in (out, *gradients))
        assert saved[0].shape[:3] == (2, 4, 128)


class ByDefinition(TorchDispatchMode):
    """torch's operations over documents of any length, on the CPU: named arguments as in their schemas, values by the
    reference."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name, kwargs = operation._schema.name, kwargs or {}
        if name not in OVERLOADED:
            return operation(*args, **kwargs)
        self.called.append(name)
        names = [argument.name for argument in operation._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        q, k, v = (given[each].unsqueeze(1) for each in ("query", "key", "value"))
        offsets = given["cum_seq_q"]
        assert (
            torch.equal(offsets, given["cum_seq_k"]) and offsets.dtype == torch.int32 and q.shape[0] == int(offsets[-1])
        )
        assert given["max_q"] == given["max_k"] == int(offsets.diff().max())
        assert given["is_causal"] and given["dropout_p"] == 0.0
        left = given.get("window_size_left")
        options = {"scale": given["scale"], "window": None if left is None else left + 1}
        lengths = offsets.diff()
        options["document_start"] = torch.repeat_interleave(offsets[:-1].long(), lengths).unsqueeze(1)
        if "grad_out" not in given:
            out, _ = attention(q, k, v, recompute=True, **options)
            rest = [torch.zeros(1) for _ in operation._schema.returns[1:]]
            rest[0] = torch.full((1,), 7.0)  # as the log-sum-exp
            return (out.squeeze(1), *rest)
        assert given["logsumexp"].item() == 7.0
        out = given["out"].unsqueeze(1)
        results = attention_backward(given["grad_out"].unsqueeze(1), q, k, v, out, (), recompute=True, **options)
        return tuple(x.squeeze(1) for x in results)


OVERLOADED = ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("window", [None, 3])
def test_documents_are_given_by_their_boundaries(window, batch, monkeypatch):
    """Rows to tokens and back, and every argument by its name in the schema, against the reference over rows."""
    sequence = 12
    q, k, v, dout = inputs(sequence, batch, 4, 2, 8, torch.float64)
    starts = torch.tensor([[0, 0, 0, 3, 4, 4, 4, 4, 8, 8, 8, 8], [0] * 12, [0] * 6 + [6] * 6])[:batch]
    options = {"scale": 0.3, "window": window, "document_start": starts.T.contiguous()}
    out, saved = attention(q, k, v, **options)
    expected = out, *attention_backward(dout, q, k, v, out, saved, **options)
    calls = BY_NAME["flash_varlen"].calls
    given = attention_library.Options(0.3, window, boundaries(starts.numpy()))
    with ByDefinition() as mode:
        out, saved = calls.forward(q, k, v, given)
        results = out, *calls.backward(dout, q, k, v, out, saved, given)
    assert mode.called == OVERLOADED
    for got, true in zip(results, expected, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-12)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ["cudnn", "flash"])
def test_as_accurate_as_the_definition(chosen, monkeypatch):
    if chosen == "flash":
        monkeypatch.setattr(attention_routes.cuda, "can_use_cudnn_attention", lambda parameters: False)
    host = inputs(256 if chosen == "cudnn" else 200, 2, 4, 2, 64, torch.bfloat16)
    q, k, v, dout = (x.to("cuda") for x in host)
    if module._route(q, k, v, **NONE) != chosen:
        pytest.skip(f"torch does not run {chosen} here")
    out, saved = attention(q, k, v, scale=0.125)
    results = out, *attention_backward(dout, q, k, v, out, saved, scale=0.125)
    torchs = autograd(*host, scale=0.125)
    exact = autograd(*(x.double() for x in host[:3]), host[3], scale=0.125)
    for got, true, of_torch in zip(results, exact, torchs, strict=True):
        assert_as_accurate(got.cpu(), true, of_torch)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("route", [route for route in ROUTES if route.for_documents], ids=lambda route: route.name)
def test_documents_as_accurate_as_the_definition(route, batch):
    host = inputs(256, batch, 4, 2, 64, torch.bfloat16)
    starts = torch.zeros(batch, 256, dtype=torch.int64)
    starts[:, 70:], starts[-1, 200:] = 70, 200
    q, k, v, dout = (x.to("cuda") for x in host)
    offsets, longest = boundaries(starts.numpy())
    call = AttentionCall(q, k, v, documents=True, boundaries=True)
    if (reason := route.rejection(call)) is not None:
        pytest.skip(f"{route.name}: {reason}")
    options = attention_library.Options(0.125, None, (offsets.to("cuda"), longest))
    route.calls.prepare()
    out, saved = route.calls.forward(q, k, v, options)
    results = out, *route.calls.backward(dout, q, k, v, out, saved, options)
    known = {"scale": 0.125, "document_start": starts.T.contiguous()}
    torchs = autograd(*host, **known)
    exact = autograd(*(x.double() for x in host[:3]), host[3], **known)
    for got, true, of_torch in zip(results, exact, torchs, strict=True):
        assert_as_accurate(got.cpu(), true, of_torch)

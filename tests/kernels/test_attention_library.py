"""When attention takes the kernels that come with torch; their values need a GPU."""

import pytest
import torch
from megalite_kernels import attention as module
from megalite_kernels import attention_library
from megalite_kernels.attention import attention, attention_backward
from megalite_kernels.dropout import AttentionDropout
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.accuracy import assert_as_accurate
from tests.kernels.test_attention import autograd, inputs


@pytest.fixture
def can_use(monkeypatch):
    """What torch says that it can run, and on what: set by a test, as no GPU may be there to ask."""
    can = {"cudnn": True, "flash": True, "architecture": "sm_90"}
    monkeypatch.setattr(attention_library.cuda, "can_use_cudnn_attention", lambda parameters: can["cudnn"])
    monkeypatch.setattr(attention_library.cuda, "can_use_flash_attention", lambda parameters: can["flash"])
    monkeypatch.setattr(attention_library, "architecture", lambda device: can["architecture"])
    return can


def fake(sequence=128, batch=2, heads=4, kv_heads=2, dim=64):
    return tuple(torch.empty(sequence, batch, count, dim, dtype=torch.bfloat16, device="cuda") for count in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize(
    "can, expected",
    [
        ({}, "cudnn"),
        ({"architecture": "sm_80"}, "flash"),
        ({"cudnn": False}, "flash"),
        ({"cudnn": False, "flash": False}, None),
    ],
)
def test_cudnn_on_hopper_else_flash_where_torch_can(can, expected, can_use):
    can_use |= can
    with FakeTensorMode():
        assert attention_library.library(*fake()) == expected


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"dim": 128}, "cudnn"),
        ({"dim": 160}, "flash"),  # cuDNN may have a forward pass for it, and no backward pass
        ({"sequence": 200}, "flash"),  # older versions read what lies behind such a sequence, newer ones have returned NaN for dq
        ({"sequence": 256}, "cudnn"),
        ({"dim": 12}, None),
        ({"sequence": 0}, None),
        ({"batch": 0}, None),
    ],
    ids=str,
)
def test_what_torch_would_refuse_or_get_wrong_when_called_directly(sizes, expected, can_use):
    with FakeTensorMode():
        assert attention_library.library(*fake(**sizes)) == expected


def test_not_on_the_cpu_nor_in_a_deterministic_run(can_use, monkeypatch):
    assert attention_library.library(*(torch.ones(4, 1, 1, 8) for _ in range(3))) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with FakeTensorMode():
        assert attention_library.library(*fake()) is None


@pytest.mark.parametrize(
    "options",
    [{"window": 8}, {"document_start": torch.zeros(128, 2)}, {"softcap": 30.0}, {"dropout": AttentionDropout(1, torch.arange(2), 0.1)}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("kernels", ["triton", "reference"])
def test_what_they_do_not_know_goes_elsewhere(options, kernels, can_use, monkeypatch):
    monkeypatch.setattr(module, "takes_triton", lambda x: kernels == "triton")
    given = {"window": None, "document_start": None, "softcap": None, "dropout": None}
    with FakeTensorMode():
        q, k, v = fake()
        assert module._route(q, k, v, *(given | options).values()) == kernels
        assert module._route(q, k, v, *given.values()) == "cudnn"


def test_wide_heads_and_fp32_on_a_gpu_take_the_reference(can_use, monkeypatch):
    can_use |= {"cudnn": False, "flash": False}
    monkeypatch.setattr(module, "takes_triton", lambda x: True)
    with FakeTensorMode():
        routes = [
            module._route(*(torch.empty(4, 1, 1, dim, dtype=dtype, device="cuda") for _ in range(3)), None)
            for dim, dtype in ((256, torch.float16), (264, torch.float16), (64, torch.float32))
        ]
    assert routes == ["triton", "reference", "reference"]


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


@pytest.mark.gpu
@pytest.mark.parametrize("chosen", ["cudnn", "flash"])
def test_as_accurate_as_the_definition(chosen, monkeypatch):
    if chosen == "flash":
        monkeypatch.setattr(attention_library.cuda, "can_use_cudnn_attention", lambda parameters: False)
    host = inputs(256 if chosen == "cudnn" else 200, 2, 4, 2, 64, torch.bfloat16)
    q, k, v, dout = (x.to("cuda") for x in host)
    if attention_library.library(q, k, v) != chosen:
        pytest.skip(f"torch does not run {chosen} here")
    out, saved = attention(q, k, v, scale=0.125)
    found = out, *attention_backward(dout, q, k, v, out, saved, scale=0.125)
    torchs = autograd(*host, scale=0.125)
    exact = autograd(*(x.double() for x in host[:3]), host[3], scale=0.125)
    for got, true, of_torch in zip(found, exact, torchs, strict=True):
        assert_as_accurate(got.cpu(), true, of_torch)

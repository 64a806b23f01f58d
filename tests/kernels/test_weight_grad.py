"""The routes of products whose fp32 accumulators are kept on a GPU: a weight's gradient, to which they are added, and a
router's logits."""

from types import SimpleNamespace

import pytest
import torch
from megalite_kernels import device_routes, router_logits, weight_grad
from torch.utils._python_dispatch import TorchDispatchMode


class OnCpu(TorchDispatchMode):
    """Products with `out_dtype`, which only GPUs have, as their schemas define them."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "dtype" not in operation._overloadname:
            return operation(*args, **kwargs)
        assert operation._schema.name in ("aten::mm", "aten::addmm")
        given = dict(zip([argument.name for argument in operation._schema.arguments], args, strict=False)) | kwargs
        left, right = (
            (given["self"], given["mat2"]) if operation._schema.name == "aten::mm" else (given["mat1"], given["mat2"])
        )
        result = left.to(given["out_dtype"]) @ right.to(given["out_dtype"])
        # beta = 0: what the gradient held does not count, be it NaN
        if operation._schema.name == "aten::addmm" and given.get("beta", 1):
            result += given["self"]
        return given["out"].copy_(result) if "out" in given else result


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", weight_grad.ROUTES)
def test_every_route_adds_what_was_not_rounded(name, overwrite, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).bfloat16() for shape in ((8, 32), (32, 16)))
    before = torch.full((8, 16), torch.nan) if overwrite else torch.randn((8, 16), generator=generator)
    grad = before.clone()
    monkeypatch.setattr(weight_grad, "measured", lambda device: device_routes.DeviceRoutes("a", weight_grad=name))
    with OnCpu():
        weight_grad.add_matmul(grad, left, right, overwrite)
    expected = left.double() @ right.double() + (0 if overwrite else before.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_device_without_measurements_adds_in_the_product(monkeypatch):
    called = []
    monkeypatch.setitem(weight_grad.ROUTES, "addmm", lambda *args: called.append(args))
    weight_grad.add_matmul(torch.zeros(1), torch.zeros(1), torch.zeros(1), False)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", router_logits.ROUTES)
def test_every_route_of_a_router_multiplies_the_same_numbers(name, dtype):
    """Of whole numbers, whose sums are exact in fp32 and not in 16 bits: equal bits."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randint(-9, 10, shape, generator=generator).to(dtype) for shape in ((7, 512), (5, 512)))
    with OnCpu():
        logits = router_logits.ROUTES[name](rows, weight)
    assert logits.dtype == torch.float32 and torch.equal(logits.double(), rows.double() @ weight.double().t())


def test_a_router_takes_the_route_of_the_device(monkeypatch):
    """On a GPU in 16 bits, the default or that of the device's file; else the reference."""
    called = []
    for name in router_logits.ROUTES:
        monkeypatch.setitem(router_logits.ROUTES, name, lambda rows, weight, name=name: called.append(name))
    for dtype in (torch.bfloat16, torch.float32):
        rows, weight = (
            SimpleNamespace(is_cuda=True, dtype=dtype, device=None, to=torch.ones(1, 1).to),
            torch.ones(1, 1, dtype=dtype),
        )
        for file in (None, "cast"):
            monkeypatch.setattr(
                router_logits, "measured", lambda device, file=file: device_routes.DeviceRoutes("a", router=file)
            )
            router_logits.logits(rows, weight)
    assert called == ["out_dtype", "cast"]
    assert router_logits.logits(torch.ones(2, 3).bfloat16(), torch.ones(1, 3).bfloat16()).tolist() == [[3.0], [3.0]]

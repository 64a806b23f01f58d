"""The routes of a weight's gradient on a GPU: each adds the product's fp32 accumulators to the gradient."""

import pytest
import torch
from megalite_kernels import device_routes, weight_grad
from torch.utils._python_dispatch import TorchDispatchMode


class OnCpu(TorchDispatchMode):
    """Products with `out_dtype`, which only GPUs have, as their schemas define them."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "dtype" not in operation._overloadname:
            return operation(*args, **kwargs)
        assert operation._schema.name in ("aten::mm", "aten::addmm")
        given = dict(zip([argument.name for argument in operation._schema.arguments], args, strict=False)) | kwargs
        left, right = (given["self"], given["mat2"]) if operation._schema.name == "aten::mm" else (given["mat1"], given["mat2"])
        found = left.to(given["out_dtype"]) @ right.to(given["out_dtype"])
        if operation._schema.name == "aten::addmm" and given.get("beta", 1):  # beta = 0: what the gradient held does not count, be it NaN
            found += given["self"]
        return given["out"].copy_(found) if "out" in given else found


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", weight_grad.ROUTES)
def test_every_route_adds_what_was_not_rounded(name, overwrite, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(shape, generator=generator).bfloat16() for shape in ((8, 32), (32, 16)))
    before = torch.full((8, 16), torch.nan) if overwrite else torch.randn((8, 16), generator=generator)
    grad = before.clone()
    monkeypatch.setattr(weight_grad, "measured", lambda device: device_routes.DeviceRoutes("a", weight_grad=name))
    with OnCpu():
        weight_grad.add_product(grad, left, right, overwrite)
    expected = left.double() @ right.double() + (0 if overwrite else before.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_device_without_measurements_adds_in_the_product(monkeypatch):
    called = []
    monkeypatch.setitem(weight_grad.ROUTES, "addmm", lambda *args: called.append(args))
    weight_grad.add_product(torch.zeros(1), torch.zeros(1), torch.zeros(1), False)
    assert len(called) == 1

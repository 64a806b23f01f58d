import subprocess
import sys

import pytest
import torch
from megalite_kernels.adamw import adamw_
from megalite_kernels.grad_norm import squared_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [None, 4.0])
def test_adamw_takes_the_steps_of_torch(dtype, scale):
    sizes = [33, 1, 4096]
    params = [torch.randn(n, dtype=dtype) for n in sizes]
    peers = [p.clone().requires_grad_() for p in params]
    peer = torch.optim.AdamW(peers, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, foreach=False)
    averages, squares = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for step in range(1, 6):
        grads = [torch.randn_like(p) for p in params]
        for p, g in zip(peers, grads, strict=True):
            p.grad = g / (scale or 1.0)
        peer.step()
        adamw_(params, grads, averages, squares, step=step, lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3,
               grad_scale=None if scale is None else torch.tensor(scale))  # fmt: skip
    torch.testing.assert_close(params, [p.detach() for p in peers])
    adamw_([], [], [], [], step=1, lr=1.0, beta1=0.9, beta2=0.9, eps=1e-8, weight_decay=0.0)


def test_adamw_does_not_import_dynamo():
    code = (
        "import sys, torch; sys.path[:0] = {!r}\nfrom megalite_kernels.adamw import adamw_\nt = [torch.ones(8)]\n"
        "adamw_(t, [torch.ones(8)], [torch.zeros(8)], [torch.zeros(8)], step=1, lr=.1, beta1=.9, beta2=.9, eps=1e-8, "
        "weight_decay=0.)\n"
        "assert not t[0].eq(1).any()\nassert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code.format(sys.path)], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_squared_sum_is_exact_to_fp32_over_lengths_that_no_row_divides(dtype):
    chunks = [torch.randn(n).to(dtype) for n in (0, 1, 4095, 4096, 70_001)]
    exact = sum(c.double().square().sum() for c in chunks)
    assert squared_sum(chunks).dtype == torch.float64
    torch.testing.assert_close(squared_sum(chunks), exact, rtol=5e-7, atol=0)
    assert squared_sum([]).item() == 0.0


def test_squared_sum_keeps_its_digits_where_one_fp32_sum_loses_them():
    chunk = torch.full((20_000_000,), 0.1)
    exact = 20_000_000 * chunk[0].double().square().item()
    assert abs(squared_sum([chunk]).item() / exact - 1) < 1e-6

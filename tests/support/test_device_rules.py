"""The rules of a device find what waits for it, in forward and in backward, and let pass what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.system.pinned_memory import copy_later, read_aside, read_later
from tests.support.device_rules import ASIDE, DEVICE, DeviceRules


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * grads[0].sum().item()


FAULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense"),
    "branch": (lambda x: 1 if x.sum() > 0 else 0, "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "tolist"),
    "cpu": (lambda x: x.cpu(), "cpu"),
    "to the host": (lambda x: x.to("cpu"), "to(cpu)"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "mask": (lambda x: x[x > 1], "index by a mask"),
    "masked_select": (lambda x: x.masked_select(x > 1), "masked_select"),
    "unique": (lambda x: x.unique(), "unique"),
    "repeats": (lambda x: x.repeat_interleave(x.long()), "repeat_interleave"),
    "a list as index": (lambda x: x[[0, 2]], "index of tensors"),
    "a list": (lambda x: torch.tensor([1.0, 2.0], device=x.device), "torch.tensor"),
    "pageable": (lambda x: torch.tensor([1.0, 2.0]).to(x.device, non_blocking=True), "to(device)"),
    "pinned, but waited for": (lambda x: torch.tensor([1.0, 2.0]).pin_memory().to(x.device), "non_blocking=False"),
    "met": (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "add of tensors"),
    "copied": (lambda x: x.copy_(torch.tensor([1.0, 2.0, 3.0])), "copy_"),
    "read too early": (
        lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True).tolist(),
        "still being copied",
    ),
    "backward": (lambda x: _ReadsInBackward.apply(x.requires_grad_()).sum().backward(), "_local_scalar_dense"),
}
ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "computed": lambda x: (x.cumsum(0) * 2.0 + torch.arange(3, device=x.device))[
        torch.zeros(2, dtype=torch.long, device=x.device)
    ],
    "a number": lambda x: torch.full((), 2.0, device=x.device) * x,
    "masked": lambda x: x.masked_fill_(x > 1, 0.0),
    "uploaded": lambda x: copy_later(torch.ones(3), x),
    "of known size": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "the host's own": lambda x: torch.tensor([1, 2])[torch.tensor([True, False])].tolist(),
}


@pytest.mark.parametrize("act, words", FAULTS.values(), ids=FAULTS)
def test_a_wait_is_found(act: Callable[[Tensor], Any], words: str) -> None:
    with DeviceRules() as rules:
        act(torch.tensor([1.0, 2.0, 3.0]).pin_memory().to(DEVICE, non_blocking=True))
    assert len(rules.faults) == 1 and words in rules.faults[0]


@pytest.mark.parametrize("act", ALLOWED.values(), ids=ALLOWED)
def test_what_does_not_wait_passes(act: Callable[[Tensor], Any]) -> None:
    with DeviceRules() as rules:
        act(torch.tensor([1.0, 2.0, 3.0]).pin_memory().to(DEVICE, non_blocking=True))
    assert not rules.faults and not rules.waits


def test_an_announced_read_tells_what_was_queued_meanwhile() -> None:
    with DeviceRules() as rules:
        x = torch.ones(3, device=DEVICE)
        later, aside = read_later(x), read_aside(lambda: x, DEVICE)
        x.exp_()
        assert later().tolist() == aside().tolist() == [1.0, 1.0, 1.0]
    assert not rules.faults and rules.waits == [["copy_", "exp_"], [ASIDE, "exp_"]]

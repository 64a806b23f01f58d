"""Optimizer state and weights on different devices. The meta device stands for one of two real ones."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.config.sections.optimizer import OptimizerConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.optimizer import adamw
from megalite.optimizer.registry import OPTIMIZERS
from megalite.optimizer.state import OptimizerState
from megalite.parallel.sharding import state_memory
from megalite.parallel.sharding.state_memory import StateMemory, StateRange
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import ParamSpec, Segment


def devices(arrays: list[list[Tensor]]) -> set[str]:
    return {each.device.type for array in arrays for each in array}


def test_one_call_updates_tensors_of_one_device(monkeypatch):
    """ZeRO-3 with offload_parameters and offload none: shards of weights in CPU memory, all else on the device."""
    calls: list[set[str]] = []
    monkeypatch.setattr(adamw, "adamw_", lambda *arrays, **options: calls.append(devices(list(arrays))))
    monkeypatch.setattr(state_memory, "UPLOAD", 64)
    # meta tensors have no values to copy
    monkeypatch.setattr(Tensor, "copy_", lambda target, source, non_blocking=False: target)
    specs = [
        ParamSpec(name, 1, (Segment(name, shape, decay=len(shape) > 1),))
        for name, shape in (("matrix", (20, 8)), ("norm", (8,)))
    ]
    options = StoreOptions(zero=3, dtype=torch.bfloat16, offload_parameters=True)
    store = ParameterStore(specs, Mesh(Layout()), options, device="meta", state=StateMemory(torch.device("meta")))
    assert {bucket.owned_weights.device.type for bucket in store.buckets} == {"cpu"}
    adamw.AdamW(OptimizerState(store, OPTIMIZERS["adamw"].tensors()), OptimizerConfig()).step(1, 1e-3, None)
    assert calls and all(each == {"meta"} for each in calls)


def test_weights_elsewhere_receive_every_part(monkeypatch):
    """Windows of a range cover it once, and each one's weights are copied after its update."""
    monkeypatch.setattr(state_memory, "UPLOAD", 64)
    copied: list[Tensor] = []
    monkeypatch.setattr(Tensor, "copy_", lambda target, source, non_blocking=False: copied.append(source) or target)
    masters = torch.arange(160.0)
    moments = [torch.zeros(160), torch.zeros(160)]
    elsewhere = StateRange(
        True, 1.0, torch.empty(160, dtype=torch.bfloat16, device="meta"), torch.ones(160), masters, moments
    )
    here = StateRange(
        True, 1.0, torch.empty(32, dtype=torch.bfloat16), torch.ones(32), torch.ones(32), [torch.zeros(32)] * 2
    )
    for window in StateMemory(torch.device("cpu")).windows([elsewhere, here]):
        assert devices([[each.weights, each.grads, each.master, *each.state] for each in window]) == {"cpu"}
        for each in window:
            each.weights[:] = each.master
    assert torch.equal(torch.cat(copied), masters.bfloat16())
    assert torch.equal(here.weights, torch.ones(32, dtype=torch.bfloat16))


def test_weights_elsewhere_are_kept_by_an_update_that_skips_itself(monkeypatch):
    """The device decides whether a step is skipped: the host copies in any case, after an update that has written
    nothing."""
    copied: list[Tensor] = []
    monkeypatch.setattr(Tensor, "copy_", lambda target, source, non_blocking=False: copied.append(source) or target)
    for dtype in (torch.bfloat16, torch.float32):
        masters = torch.linspace(-3.0, 3.0, 160)
        elsewhere = StateRange(True, 1.0, torch.empty(160, dtype=dtype, device="meta"), torch.ones(160), masters, [])
        (window,) = list(StateMemory(torch.device("cpu")).windows([elsewhere]))
        assert window[0].separate
        assert torch.equal(copied.pop(), masters.to(dtype))

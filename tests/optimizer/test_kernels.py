"""Optimizer steps with kernels, in Triton's interpreter, are those without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megalite_kernels import backend
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.model.parameters import model_specs
from megalite.optimizer.adamw import AdamW
from megalite.optimizer.norm import clip_divisor
from megalite.optimizer.registry import OPTIMIZERS
from megalite.optimizer.state import OptimizerState
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from tests.conftest import HAS_GPU
from tests.optimizer.norms import total_norm

OPTIONS = OptimizerConfig(lr=0.02, betas=[0.8, 0.97], eps=1e-6, weight_decay=0.3)
MODEL = ModelConfig(
    vocab_size=41, hidden_size=24, intermediate_size=40, num_hidden_layers=2, norm="layer", attention_bias=True
)


@dataclass
class Result:
    norms: list[float]
    state: list[Tensor]  # masters and moments of all buckets
    rounds: bool  # whether all weights, gathered over dp, are rounded masters, and padding is zero


def steps(context: Any, kernels: str, zero: int, grad_dtype: torch.dtype) -> Result:
    """Three steps in bf16 from random gradients, of which the first is clipped."""
    from tests.kernels.interpreter import repair

    mesh = context.cached(
        ("kernels", context.world, zero), lambda: Mesh(Layout(dp=context.world, dp_shard=None if zero else 1))
    )
    store = ParameterStore(
        model_specs(MODEL), mesh, StoreOptions(zero=zero, dtype=torch.bfloat16, grad_dtype=grad_dtype, bucket_bytes=3e3)
    )
    store.initialize(1)
    optimizer, norms = AdamW(OptimizerState(store, OPTIMIZERS["adamw"].tensors()), OPTIONS), []
    generator = torch.Generator().manual_seed(5)
    context.cached("interpreter", repair)
    backend.select(kernels)
    try:
        for step in range(1, 4):
            for memory in store.buckets:
                whole = torch.zeros(memory.layout.size)
                for slot in memory.layout.slots:
                    whole[slot.start : slot.stop].normal_(generator=generator)
                memory.owned_grads.copy_(whole[memory.start : memory.stop] / (1 if step == 1 else 100))
            measured, _ = total_norm(store, store.mesh)
            norms.append(measured.item())
            optimizer.step(step, 0.02 / step, clip_divisor(measured, 3.0))
            store.gatherer.gather_updated()
            store.gatherer.finish()
    finally:
        backend.select("torch")
    rounds = all(
        torch.equal(memory.owned_weights, memory.master.bfloat16())
        and not memory.weights[memory.layout.slots[-1].stop :].any()
        for memory in store.buckets
    )
    return Result(norms, optimizer.state.copy(), rounds)


@pytest.mark.skipif(HAS_GPU, reason="the kernels are interpreted")
@pytest.mark.parametrize("zero, grad_dtype", [(0, torch.float32), (1, torch.float32), (1, torch.bfloat16)], ids=str)
def test_steps_with_kernels_are_those_without(zero, grad_dtype, ranks):
    pytest.importorskip("triton")
    results = {kernels: ranks.run(2, steps, kernels, zero, grad_dtype) for kernels in ("triton", "torch")}
    for ours, reference in zip(results["triton"], results["torch"], strict=True):
        assert ours.norms == pytest.approx(reference.norms, rel=1e-7) and ours.norms[0] > 3 > ours.norms[1]
        for got, expected in zip(ours.state, reference.state, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-8)
        assert ours.rounds and reference.rounds
    pairs = [zip(*(each.state for each in both), strict=True) for both in zip(*results.values(), strict=True)]
    assert not all(torch.equal(x, y) for rank in pairs for x, y in rank), (
        "kernels do not round as torch does: these cannot have run"
    )

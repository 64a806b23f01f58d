"""Given gradients through Muon, on the pool's ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.config.sections.muon import MuonConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.mesh.mesh import Layout, Mesh
from megalite.model.blocks.attention.parameters import kv_replicas
from megalite.model.parameters import model_specs
from megalite.optimizer.muon import exchange
from megalite.optimizer.muon.muon import Muon
from megalite.optimizer.registry import OPTIMIZERS
from megalite.optimizer.state import OptimizerState
from megalite.parallel.all_to_all import all_to_all
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import Rectangle
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer

MODEL = ModelConfig(
    vocab_size=44,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    mlp_bias=True,
)
OPTIONS, MUON = OptimizerConfig(lr=0.01), MuonConfig(lr=0.03)
SEED, STEPS = 3, 3


def gradients(step: int) -> dict[str, Tensor]:
    """The gradient of every global tensor, the same wherever it is computed."""
    generator = torch.Generator().manual_seed(step)
    return {
        segment.name: torch.randn(segment.shape, generator=generator)
        for spec in model_specs(MODEL)
        for segment in spec.segments
    }


def window(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(rectangle.offsets, rectangle.tensor.shape, strict=True)
    )


def stepped(
    context: Any, layout: dict[str, Any], options: dict[str, Any]
) -> tuple[list[tuple[str, Any, Tensor]], int, int]:
    """All state that this rank keeps after some steps of given gradients, as (name, where, values). And what was sent:
    the number of all-to-alls, and the elements of this rank.

    layout: of the mesh. options: of the store.
    """
    dims = Layout(**layout)
    key = ("muon", *layout.items())
    mesh = context.cached(
        key, lambda: Mesh(dims, replicas={kv_replicas(MODEL.kv_heads, dims.tp)} - {1}, stage_axis=True)
    )
    mesh.traffic.clear()
    store = ParameterStore(model_specs(MODEL, tp=dims.tp), mesh, StoreOptions(**options))
    store.initialize(SEED)
    store.publish()
    optimizer, sent = Muon(OptimizerState(store, OPTIMIZERS["muon"].tensors()), OPTIONS, MUON), 0

    def counted(x: Tensor, *others: Any) -> Any:
        nonlocal sent
        sent += x.numel()
        return all_to_all(x, *others)

    for step in range(1, STEPS + 1):
        given = gradients(step)
        for bucket in store.buckets:
            for flat, offset in store.rectangles_in(bucket, bucket.start, bucket.stop):
                place = bucket.rectangle("grad", bucket.owned_grads, flat, offset)
                place.tensor.copy_(given[flat.segment.name][window(place)])
        with patch.object(exchange, "all_to_all", counted):
            optimizer.step(step, OPTIONS.lr, None)
        store.gatherer.gather_updated()
        for bucket in store.buckets:
            bucket.await_weights()
    state = [(each.name, window(each), each.tensor.clone()) for each in optimizer.state.to_load()]
    return state, mesh.traffic["all_to_all", "stage"], sent


def undone(context: Any, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train without waiting for norms: losses, final weights and moments, and how often a step was restored."""
    trainer = make_trainer(context, config)
    restored = 0
    restore = trainer.optimizer.state.restore

    def counted(copies: Any) -> None:
        nonlocal restored
        restored += 1
        restore(copies)

    trainer.optimizer.state.restore = counted  # type: ignore[method-assign]
    try:
        results = [result for _ in range(steps) for result in trainer.train_step()]
        trainer.weight_updater.drain()
        tensors = global_tensors(trainer, ("weight", "momentum_buffer", "exp_avg", "exp_avg_sq"))
    finally:
        trainer.close()
    return {"losses": [result.loss for result in results], "tensors": tensors, "restored": restored}

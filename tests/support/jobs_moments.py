"""Given gradients through an optimizer, on the pool's ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.config.load import from_dict
from megalite.mesh.mesh import Layout, Mesh
from megalite.model.blocks.attention.parameters import kv_replicas
from megalite.model.parameters import model_specs
from megalite.optimizer.registry import alignment, create, kinds_of
from megalite.optimizer.state import OptimizerState
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.training.verify import global_tensors
from tests.support.jobs import make_trainer
from tests.support.jobs_muon import window

MODEL = {  # rows of whole blocks, which two ranks split, and biases
    "vocab_size": 45,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mlp_bias": True,
}
SEED = 3


def stepped(
    context: Any, options: dict[str, Any], layout: dict[str, Any], store_options: dict[str, Any], divisors: list[float]
) -> list[tuple[str, Any, Tensor]]:
    """All state that this rank keeps after steps of given gradients, as (name, where, values).

    options: of the optimizer. layout: of the mesh. divisors: of the gradients in each step; 0: none, NaN: skip it.
    """
    config, dims = from_dict({"model": MODEL, "optimizer": options, "run": {"seed": SEED}}), Layout(**layout)
    key = ("moments", *layout.items())
    replicas = {kv_replicas(config.model.kv_heads, dims.tp)} - {1}
    mesh = context.cached(key, lambda: Mesh(dims, replicas=replicas, stage_axis=True))
    specs = model_specs(config.model, tp=dims.tp)
    store = ParameterStore(specs, mesh, StoreOptions(pad=alignment(config), **store_options))
    store.initialize(SEED)
    store.publish()
    optimizer = create(config, OptimizerState(store, kinds_of(config), SEED))
    whole = {segment.name: segment.shape for spec in model_specs(config.model) for segment in spec.segments}
    for step, divisor in enumerate(divisors, 1):
        generator = torch.Generator().manual_seed(step)
        given = {name: torch.randn(shape, generator=generator) for name, shape in whole.items()}
        for bucket in store.buckets:
            for flat, offset in store.rectangles_in(bucket, bucket.start, bucket.stop):
                place = bucket.rectangle("grad", bucket.owned_grads, flat, offset)
                place.tensor.copy_(given[flat.segment.name][window(place)])
        optimizer.step(step, config.optimizer.lr, torch.tensor(divisor) if divisor else None)
        store.gatherer.gather_updated()
        for bucket in store.buckets:
            bucket.await_weights()
    return [(each.name, window(each), each.tensor.clone()) for each in optimizer.state.to_load()]


def resumed(context: Any, config: dict[str, Any], steps: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Train with a new trainer, which may resume, and save: state before and after, and when it started."""
    trainer = make_trainer(context, config)
    try:
        before = global_tensors(trainer, kinds)
        losses = [trainer.step().loss for _ in range(steps)]
        return {
            "before": before,
            "after": global_tensors(trainer, kinds),
            "losses": losses,
            "started": trainer.optimizer.state.started,
            "notes": trainer.notes,
            "directory": str(trainer.save()),
        }
    finally:
        trainer.close()

"""What the model computes and keeps, unit by unit, derived from the configuration.

`units` describes a unit (embedding, layer, head) once, as data: its matmuls, attention, elementwise
kernels, and what each keeps for the backward. All costs follow from it: `flops` counts FLOPs by the usual
conventions, for MFU and for the partition over stages; `megalite.planner` derives memory (`activations`),
bytes sent (`traffic`) and time (`operations`). A new kind of layer needs only a new description.
"""

from megalite.model.cost.flops import (
    Convention,
    Flops,
    LayerCosts,
    layer_costs,
    model_flops_per_token,
    per_token,
)

__all__ = ["Convention", "Flops", "LayerCosts", "layer_costs", "model_flops_per_token", "per_token"]

"""What the model computes and keeps, unit by unit, derived from the configuration.

`units` describes a unit (embedding, layer, head) once, as data: its matmuls, attention, elementwise
kernels, and what each keeps for the backward; a layer's are those of its blocks (`blocks/KIND/cost.py`). All
costs follow from it: `flops` counts FLOPs by the usual conventions, for MFU and for the partition over
stages; `megalite.planner` derives memory (`activations`), bytes sent (`traffic`) and time (`operations`).
"""

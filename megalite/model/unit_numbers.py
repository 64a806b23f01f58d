"""The numbers of a model's units, and which layers and stages they belong to.

Unit 0 is the embedding, units 1 … L are the layers, and unit L + 1 is the final norm and the head, with the
modules of multi-token prediction (MTP).
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.config.sections.model import ModelConfig
from megalite.model.mtp.losses import module_layers


def head_unit(model: ModelConfig) -> int:
    """Return the last unit: final norm and head."""
    return model.num_hidden_layers + 1


def layers_in(model: ModelConfig, unit: int) -> range:
    """Return the 0-based indices of the layers in a unit.

    The embedding has none, the last unit has the layers of the MTP modules, and each other unit has one.
    """
    if unit == 0:
        return range(0)
    return module_layers(model) if unit == head_unit(model) else range(unit - 1, unit)


def unit_of(model: ModelConfig, layer: int) -> int:
    """Return the unit of a layer (0-based)."""
    return min(layer + 1, head_unit(model))


def stage_units(partition: Sequence[int], stage: int) -> range:
    """Return the units of a pipeline stage.

    Args:
        partition: the number of layers of each stage.
    """
    first = sum(partition[:stage])
    is_last = stage == len(partition) - 1
    return range(0 if stage == 0 else first + 1, first + partition[stage] + 1 + int(is_last))

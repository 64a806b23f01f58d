"""What of a model multiplies in fp8 (`train.fp8`), as names and as lines for users."""

from __future__ import annotations

from collections import defaultdict

from megalite.assembly.plan import first_place
from megalite.config.schema import Config
from megalite.model.parameters import model_specs
from megalite.parallel.fp8_choice import BLOCKS, fp8_choice
from megalite.parallel.spec import ParamSpec


def fp8_matrices(config: Config) -> list[ParamSpec]:
    """Return the stored matrices of the whole model that multiply in fp8, in the order of its layers."""
    at, layers = first_place(config), config.model.num_hidden_layers
    specs = model_specs(config.model, tp=config.parallel.tp)
    return [spec for spec in specs if fp8_choice(spec, at, config.train, layers).rows]


def describe_fp8(config: Config) -> list[str]:
    """Return a line with the matrices that multiply in fp8, and those that do not because of their sizes.

    The result is empty without fp8.
    """
    train = config.train
    if train.fp8 == "none":
        return []
    at = first_place(config)
    chosen, kept = set[int](), defaultdict[str, set[int]](set)
    matrices = 0
    for spec in model_specs(config.model, tp=config.parallel.tp):
        choice = fp8_choice(spec, at, train, config.model.num_hidden_layers)
        if choice.rows:
            matrices += 1
            chosen.add(spec.unit)
        if choice.size is not None:
            kept[".".join(spec.name.split(".")[2:])].add(choice.size)
    line = f"fp8 ({train.fp8}): {matrices} matrices of {len(chosen)} layers"
    if kept:
        block = BLOCKS[train.fp8]
        parts = (f"{name} ({', '.join(map(str, sorted(sizes)))})" for name, sizes in sorted(kept.items()))
        line += (
            f"; these, or rows of them, keep {train.precision}, because a rank's part has a size that is not "
            f"a multiple of {block}: {', '.join(parts)}"
        )
    return [line]

"""What of a model multiplies in fp8 (`train.fp8`), as specs and as lines for users, and whether a GPU can."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from megalite.assembly.plan import coded, first_place
from megalite.config.errors import ConfigError
from megalite.config.schema import Config
from megalite.model.parameters import model_specs
from megalite.parallel.fp8_choice import BLOCKS, FORWARD_ONLY, Fp8Options, fp8_choice
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    import torch


def fp8_matrices(config: Config) -> list[ParamSpec]:
    """Return the stored matrices of the whole model that multiply in fp8, in the order of its layers."""
    at, layers = first_place(config), config.model.num_hidden_layers
    specs = model_specs(config.model, tp=config.parallel.tp)
    return [spec for spec in specs if fp8_choice(spec, at, Fp8Options.of(config.train), layers).rows]


def check_fp8(config: Config, device: torch.device) -> None:
    """Raise ConfigError if a GPU has no kernel for `train.fp8`.

    The reference multiplies on request (`train.kernels = torch`), and in fp64.
    """
    train = config.train
    if train.fp8 == "none" or train.kernels == "torch" or train.precision == "fp64":
        return
    from megalite_kernels.fp8_matmul import missing

    reason = missing(device, train.fp8)
    if reason is None:
        return
    without = missing(device, "block") is None
    others = "train.fp8 to block or none" if without else "train.fp8 to none"
    raise ConfigError(
        f"train.fp8 = {train.fp8} {reason}. Set {others}, or set train.kernels to torch, which rounds the "
        "operands to fp8 and multiplies them in a wider precision: slowly, to compare numbers."
    )


def describe_fp8(config: Config) -> list[str]:
    """Return a line with the matrices that multiply in fp8, and those that do not because of their sizes.

    With ZeRO-3 it also has the number of those that are gathered as codes. The result is empty without fp8.
    """
    train = config.train
    if train.fp8 == "none":
        return []
    at = first_place(config)
    chosen, kept = set[int](), defaultdict[str, set[int]](set)
    matrices = gathered = 0
    partial = set[str]()
    for spec in model_specs(config.model, tp=config.parallel.tp):
        choice = fp8_choice(spec, at, Fp8Options.of(train), config.model.num_hidden_layers)
        gathered += coded(spec, config).coded
        if choice.rows:
            matrices += 1
            chosen.add(spec.unit)
        name = ".".join(spec.name.split(".")[2:])
        if choice.partial_gradient and spec.segments[0].role not in FORWARD_ONLY:
            partial.add(name)
        if choice.size is not None:
            kept[name].add(choice.size)
    line = f"fp8 ({train.fp8}): {matrices} matrices of {len(chosen)} layers"
    if not matrices:
        line = f"WARNING: train.fp8 = {train.fp8} has no effect, because no matrix multiplies in fp8"
    if gathered:
        line += f", of which ZeRO-3 gathers the codes of {gathered}"
    if partial:
        line += (
            f"; gradients of these keep {train.precision}, because several tp ranks hold the same heads: "
            f"{', '.join(sorted(partial))}"
        )
    if kept:
        block = BLOCKS[train.fp8]
        parts = (f"{name} ({', '.join(map(str, sorted(sizes)))})" for name, sizes in sorted(kept.items()))
        line += (
            f"; these, or rows of them, keep {train.precision}, because a rank's part has a size that is not "
            f"a multiple of {block}: {', '.join(parts)}"
        )
    return [line]

"""The stored parameters of MTP modules: `layers.61.mtp.enorm.weight`, `….hnorm`, `….eh_proj` and `….norm`.

The layer of each module has the names of any layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.model.spec_builder import SpecBuilder
from megalite.parallel.spec import ParamSpec


def module_specs(build: SpecBuilder, index: int, layer: Sequence[ParamSpec]) -> list[ParamSpec]:
    """Return the parameters of the module with layer `index`, in the order of the forward.

    Args:
        layer: the parameters of the layer.
    """
    name = f"layers.{index}.mtp"
    specs = build.norm(f"{name}.enorm") + build.norm(f"{name}.hnorm")
    specs += build.whole(f"{name}.eh_proj.weight", build.model.hidden_size, wider=2)
    return [*specs, *layer, *build.norm(f"{name}.norm")]

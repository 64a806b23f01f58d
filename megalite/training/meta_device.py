"""Construction of single ranks of any run on the meta device, with torch's fake process group.

All parts of the run are built, without their memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.schema import Config
from megalite.mesh.mesh import Mesh
from megalite.optimizer.registry import kinds_of
from megalite.optimizer.state import OptimizerState
from megalite.parallel.sharding.state_memory import StateMemory
from megalite.planner.api import DeviceType, Sharing
from megalite.training.memory_report import ModelStates, planned, states_of


class Disagreement(RuntimeError):
    """Raised if the size of the built states differs from the plan."""


class _Nowhere(StateMemory):
    """Optimizer state without memory.

    `device` is the device of the weights if the state would be stored next to them. The store then decides
    whether weights are their own master weights.
    """

    def __init__(self, config: Config, device: DeviceType):
        offloaded = config.parallel.offload != "none"
        weights_away = config.parallel.offload_parameters and Sharing.of(config).zero == 3
        together = device == "cpu" or offloaded == weights_away
        super().__init__(torch.device("meta" if together else "cpu"))

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, device="meta")


@contextmanager
def fake_process(rank: int, world_size: int) -> Iterator[None]:
    """Context manager in which this process is one rank of a run whose communication sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_on_meta(config: Config, ranks: Sequence[int], device: DeviceType) -> list[ModelStates]:
    """Return the bytes of the model states of these ranks, as the store allocates them.

    Args:
        device: the type of device that the ranks would use.
    """
    layout, states = build.layout(config), []
    # their process group would be real
    options = build.mesh_options(config) | {"background": ()}
    config = replace(config, train=replace(config.train, kernels="auto"))  # no kernel runs here
    # also tensors in CPU memory
    everything = torch.device("meta") if config.parallel.offload_parameters else nullcontext()
    for rank in ranks:
        with fake_process(rank, layout.world) if layout.world > 1 else nullcontext(), everything:
            mesh = Mesh(layout, **options)
            store = build.build_parts(config, mesh, "meta", state=_Nowhere(config, device)).store
            states.append(states_of(OptimizerState(store, kinds_of(config))))
    return states


def check_states(config: Config, ranks: Sequence[int], device: DeviceType) -> None:
    """Build these ranks and compare the bytes of each part with the plan.

    Raises:
        Disagreement: names the first part that differs.
    """
    layout = build.layout(config)
    for rank, state in zip(ranks, build_on_meta(config, ranks, device), strict=True):
        place = layout.position(rank)
        expected = planned(
            config, place["pp"], device, (place["dp"] * layout.cp + place["cp"]) % layout.shard
        )
        for part, own, theirs in zip(ModelStates._fields, state, expected, strict=True):
            if own != theirs:
                raise Disagreement(
                    f"rank {rank}: {part} takes {own:,} bytes as built, which does not match the "
                    f"planned {theirs:,} bytes."
                )

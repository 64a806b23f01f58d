"""The parameters of a rank by domain: dense ones and experts, whose gradients other ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megalite.model.cost.records import Elementwise, EmbeddingLookup, LocalMatmul, Matmul, UnitCost
from megalite.model.cost.units import Units
from megalite.planner.hardware.devices import Device
from megalite.planner.hardware.links import Group, placed

if TYPE_CHECKING:
    from megalite.planner.time.step import LayoutChoice


class Parameters(NamedTuple):
    """Numbers of parameters on one rank before ZeRO shards them: all and trained; of these, experts'.

    Adapters are included.

    Attributes:
        quantized: those that multiply in fp8.
        coded: those of them whose codes ZeRO-3 gathers, or those in a quantized base (`lora.base`).
    """

    stored: float
    trained: float
    expert_stored: float = 0.0
    expert_trained: float = 0.0
    quantized: float = 0.0
    coded: float = 0.0
    expert_coded: float = 0.0

    @property
    def domains(self) -> tuple[tuple[float, float, float], ...]:
        """Return (stored, trained, coded) of dense parameters, and of experts if there are any."""
        experts = self.expert_stored, self.expert_trained, self.expert_coded
        all_of_them = self.stored, self.trained, self.coded
        dense, trained, coded = (a - b for a, b in zip(all_of_them, experts, strict=True))
        return ((dense, trained, coded), experts) if self.expert_stored else ((dense, trained, coded),)

    @classmethod
    def of(
        cls, units: Units, layers: Sequence[int], embedding: bool, head: bool, further: bool = False
    ) -> Parameters:
        """Return the parameters of some layers, optionally with the embedding and the head's matrix.

        Args:
            further: include the parameters of the head's further losses, without their layers.
        """
        kinds = {units.alike(index): index for index in layers}
        each = {kind: cls._of(units.layer(index), units) for kind, index in kinds.items()}
        parts = [each[units.alike(index)] for index in layers]
        parts += [cls._of(units.embedding(), units)] if embedding else []
        parts += [cls._of(loss.joining, units) for loss in units.further_losses()] if further else []
        if head:
            parts += [
                cls._of(UnitCost((replace(block, before=Elementwise()),)), units)
                for block in units.head().blocks
            ]
        return cls(*map(sum, zip(*parts, strict=True))) if parts else cls(0.0, 0.0)

    @classmethod
    def _of(cls, unit: UnitCost, units: Units) -> Parameters:
        adapters = sum(matmul.local_adapter_weights(units.share.tp) for matmul in unit.matmuls)
        stored = unit.local_weights + adapters
        experts = [matmul for matmul in unit.matmuls if isinstance(matmul, LocalMatmul) and matmul.experts]
        own_adapters = sum(matmul.local_adapter_weights(units.share.tp) for matmul in experts)
        own_stored = own_adapters + sum(matmul.local_weights for matmul in experts)
        own_trained = own_adapters + sum(matmul.local_weights for matmul in experts if not matmul.frozen)
        fp8 = (
            sum(matmul.fp8.rows * matmul.inputs for matmul in unit.matmuls),
            *(cls._coded(matmuls, units) for matmuls in (unit.matmuls, experts)),
        )
        if not units.lora.rank:
            return cls(stored, stored, own_stored, own_trained, *fp8)
        own = sum(
            step.local_weights
            for step in unit.steps
            if isinstance(step, Matmul | EmbeddingLookup) and not step.frozen
        )
        return cls(stored, own + adapters, own_stored, own_trained, *fp8)

    @staticmethod
    def _coded(matmuls: Sequence[Matmul], units: Units) -> float:
        """Return the elements of weights that multiply in fp8 only (`block`), or are in a quantized base."""
        if units.lora.base != "none":
            return sum(each.local_weights for each in matmuls if each.frozen and each.name != "head")
        whole = (each for each in matmuls if each.fp8.input_gradient and units.fp8.recipe == "block")
        return sum(each.local_weights for each in whole)


class ParameterDomain(NamedTuple):
    """Parameters of a rank, and the groups of ranks that sum their gradients.

    ZeRO shards over `shard`; the ranks in `replicate` hold the same shard (HSDP).
    """

    stored: float
    trained: float
    coded: float
    ranks: Group
    shard: Group
    replicate: Group


def domains(device: Device, choice: LayoutChoice, size: Parameters) -> list[ParameterDomain]:
    """Return the domains of a rank's parameters.

    Dense parameters are in data parallelism, experts in the ranks of a stage with the same experts.
    """

    groups = _groups(
        device.per_node,
        choice.data,
        choice.dims.expert_data,
        *shares(choice),
        choice.tp,
        choice.ep,
        choice.gpus,
    )
    return [ParameterDomain(*sizes, *ranks) for sizes, ranks in zip(size.domains, groups, strict=False)]


def shares(choice: LayoutChoice) -> tuple[int, int]:
    """Return the numbers of ranks over which ZeRO shards dense parameters, and experts."""
    return choice.dims.shard, choice.dims.expert_shard


@lru_cache(maxsize=4096)
def _groups(
    per_node: int, data: int, expert_data: int, shard: int, expert_shard: int, tp: int, ep: int, world: int
) -> tuple[tuple[Group, Group, Group], ...]:
    """Return the groups of dense parameters and of experts.

    These are the ranks that sum gradients, a shard group, and the ranks with the same shard.
    """

    def groups(ranks: int, shard: int, stride: int) -> tuple[Group, Group, Group]:
        sizes = (ranks, stride), (shard, stride), (ranks // shard, stride * shard)
        first, second, third = (placed(per_node, *each, world) for each in sizes)
        return first, second, third

    return groups(data, shard, tp), groups(expert_data, expert_shard, ep)

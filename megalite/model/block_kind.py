"""The questions that a kind of block answers about itself, and the place of a block in its layer.

A kind is a room, `megalite.model.blocks.KIND`, with files of the same names:

    kind.py         its class of `BlockKind`, which the other files answer for
    parameters.py   its stored parameters
    block.py        its computation: a module from weights, mesh and options
    cost.py         what one rank computes, keeps and sends for one microbatch
    context.py      what it exchanges under context parallelism
    cache.py        what a row keeps in generation

The rest of the code knows no kind. It asks the methods of `BlockKind`, whose defaults are the answers of a
block that has nothing of the sort. Answers that need torch are imported when they are asked for, so that
plans need none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megalite.config.schema import Config
from megalite.config.sections.model import ModelConfig
from megalite.parallel.spec import ParamSpec

if TYPE_CHECKING:
    import torch

    from megalite.mesh.mesh import Mesh
    from megalite.model.block_module import BlockModule
    from megalite.model.cost.mixers import StateSizes
    from megalite.model.cost.recomputed import Group
    from megalite.model.cost.records import BlockCost, Dispatch, Kernels, Matmul, Share
    from megalite.model.cost.units import Units
    from megalite.model.forward_state import ForwardState
    from megalite.model.layer_options import LayerOptions
    from megalite.model.spec_builder import SpecBuilder
    from megalite.model.statistics import ModelStatistics
    from megalite.parallel.weight import Weights


@dataclass(frozen=True)
class BlockSpec:
    """A block in its place in a layer: x + dropout(scale · output_norm(factor · block(input_norm(x)))).

    Attributes:
        kind: its name in `kinds.KINDS`.
        layer: index of its layer, 0-based.
        slot: the part of the layer's stored names that its parameters are under: `attention`, `mixer` (of
            blocks with a state) or `mlp`.
        input_norm: the stored name of the norm of its input within the layer; None: it has none.
        output_norm: whether its output is normalized before it is added.
        beside: whether it reads the input of the block before it, and not the sum with that block's output.
            Without a norm of its own it reads that block's normalized input.
    """

    kind: str
    layer: int
    slot: str
    input_norm: str | None
    output_norm: bool = False
    beside: bool = False

    @property
    def name(self) -> str:
        """Return the prefix of the stored names of its parameters."""
        return f"layers.{self.layer}.{self.slot}"


class BlockKind:
    """A kind of block; each method answers one question about it.

    Attributes:
        name: its name in `model.layer_blocks`.
        slot: the slot of a layer that it takes: attention, mixer or mlp.
        joins_output: whether the operation `residual` may repeat the block's last matmul, which must compute
            the output from what the backward has (`BlockModule.last`).
        output_operation: the operation of `train.recompute` that computes the block's output; None: no name
            stands for it.
        operations: operations that `train.recompute` may name besides those of `config.recompute`, and what
            each computes again.
        context: the values of `parallel.context` that it supports; (): it needs whole rows.
        projections: roles of its matrices that adapters may adapt besides those of `config.sections.lora`.
    """

    name: str
    slot: str
    joins_output: bool = False
    output_operation: str | None = None
    operations: Mapping[str, str] = {}
    context: Sequence[str] = ()
    projections: Sequence[str] = ()

    def file(self, name: str) -> Any:
        """Import a file of the room."""
        return import_module(f"{type(self).__module__.rpartition('.')[0]}.{name}")

    # ---- parameters.py

    def specs(self, build: SpecBuilder, block: BlockSpec) -> list[ParamSpec]:
        """Return its stored parameters, in the order of the forward."""
        raise NotImplementedError

    def idle_parameters(self, model: ModelConfig) -> int:
        """Return the number of its parameters that do not process a given token."""
        return 0

    def replicas(self, model: ModelConfig, tp: int) -> Collection[int]:
        """Return the numbers of tp ranks that hold the same part of a tensor of it that is split."""
        return ()

    def dispatch(self, model: ModelConfig) -> Dispatch | None:
        """Return what it sends over the ranks of `parallel.ep`, or None if it does not use them."""
        return None

    # ---- block.py

    def make(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ) -> BlockModule:
        """Return the module that computes it."""
        module: BlockModule = self.file("block").make(model, block, weights, mesh, options)
        return module

    def inputs(self, model: ModelConfig, dtype: torch.dtype) -> Callable[[ForwardState], None] | None:
        """Return what a stage adds to the state of a microbatch for its blocks of this kind, or None."""
        return None

    def statistics(
        self, config: Config, blocks: Sequence[BlockModule], device: torch.device
    ) -> ModelStatistics | None:
        """Return what its blocks report of a step and learn from it, or None.

        Args:
            blocks: the modules of this kind on this rank.
        """
        return None

    def learns(self, model: ModelConfig) -> bool:
        """Return whether the next step's forward depends on sums over the whole step besides the gradients.

        Then no rank may begin it before these are known.
        """
        return False

    def counts_queries(self, model: ModelConfig) -> bool:
        """Return whether it has a loss that is a mean over all tokens but padding (`model.queries`)."""
        return False

    def output_factor(self, model: ModelConfig) -> float:
        """Return the factor on its output."""
        return 1.0

    def output_factors(self, model: ModelConfig, block: BlockSpec) -> tuple[float, float]:
        """Return the factors on the output of a block before its norm, if it has one, and before the sum."""
        own, residual = self.output_factor(model), model.residual_factor
        return (own, residual) if block.output_norm else (1.0, own * residual)

    # ---- cost.py

    def cost(self, units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
        """Return its steps between its norms, and the temporaries of its backward.

        Args:
            matmuls: those of all tokens with the matrices of its layer, by stored name within the layer.
        """
        cost: BlockCost = self.file("cost").cost(units, block, matmuls)
        return cost

    def follows(self, model: ModelConfig, layer: int) -> bool:
        """Return whether a block of it in this layer or a later one uses what a layer before this one has
        computed besides the stream.

        No stage may then begin with the layer.
        """
        return False

    def state_sizes(self, model: ModelConfig, share: Share) -> StateSizes | None:
        """Return what its recurrence passes or exchanges over cp, or None if it has none."""
        return None

    def alike(self, model: ModelConfig, layer: int) -> Hashable:
        """Return a key that layers share whose blocks of this kind cost the same."""
        return None

    def recomputed(self, units: Units, cost: BlockCost) -> list[Group]:
        """Return the operations that its backward can compute again, with what each frees.

        Norms and sums around it are its layer's.
        """
        return []

    def window(self, model: ModelConfig, layer: int) -> int | None:
        """Return how many positions back a token looks, its own included; None: to the start, or not by
        position."""
        return None

    def table_values(self, model: ModelConfig, layers: Sequence[int], positions: int) -> int:
        """Return the values of tables by position that a stage keeps for its blocks of this kind.

        Args:
            layers: the layers of the stage that have a block of this kind.
        """
        return 0

    def keeps_scores(self, model: ModelConfig, kernels: Kernels) -> bool:
        """Return whether its forward keeps a value for each pair of positions."""
        return False

    # ---- cache.py

    def cached(self, block: BlockModule) -> BlockModule:
        """Return a block that reads and extends a row's cache in generation.

        A block that computes each position by itself keeps nothing, and is returned as it is.
        """
        return block

    def outdated_after(self, model: ModelConfig) -> int | None:
        """Return the length of a row after which what it keeps must be computed again, or None."""
        return None

    # ---- at the start of a run

    def routes(self, config: Config, device: torch.device, dtype: torch.dtype, documents: bool) -> list[str]:
        """Describe which kernels it takes, one line for each.

        Args:
            documents: whether rows hold several documents.
        """
        return []

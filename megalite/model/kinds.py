"""The kinds of blocks, and which blocks a layer consists of.

`KINDS` is open: `register` adds a kind, whose name `model.layer_blocks` may then have. The facts that other
rooms need about a model's blocks are offered here under general names.
"""

from __future__ import annotations

from megalite.config.layer_blocks import LAYER_BLOCKS, BlockOption
from megalite.config.recompute import OPERATIONS
from megalite.config.sections.lora import PROJECTIONS
from megalite.config.sections.model import ModelConfig
from megalite.model.block_kind import BlockKind, BlockSpec
from megalite.model.blocks.attention.kind import AttentionKind
from megalite.model.blocks.convolution.kind import ConvolutionKind
from megalite.model.blocks.delta.kind import DeltaKind
from megalite.model.blocks.feed_forward.kind import FeedForwardKind
from megalite.model.blocks.indexed_attention.kind import IndexedAttentionKind
from megalite.model.blocks.latent_attention.kind import LatentAttentionKind
from megalite.model.blocks.mamba.kind import MambaKind
from megalite.model.blocks.mixture.kind import MixtureKind
from megalite.model.cost.records import Dispatch
from megalite.model.mtp.losses import layer_count

KINDS: dict[str, BlockKind] = {}
"""Name → kind. `register` adds one."""
INPUT_NORMS = {"attention": "input_norm", "mixer": "input_norm", "mlp": "mlp_norm"}
"""Slot → the stored name of the norm of its input."""


def register(kind: BlockKind) -> None:
    """Add a kind, with its operations of `train.recompute` and the matrices that adapters may adapt.

    A kind that is registered again replaces the one with its name.
    """
    KINDS[kind.name] = kind
    LAYER_BLOCKS[kind.name] = BlockOption(kind.slot, tuple(kind.context))
    OPERATIONS.update(kind.operations)
    PROJECTIONS.extend(role for role in kind.projections if role not in PROJECTIONS)


for _kind in (
    *(AttentionKind(), LatentAttentionKind(), IndexedAttentionKind()),
    *(DeltaKind(), MambaKind(), ConvolutionKind()),
    *(FeedForwardKind(), MixtureKind()),
):
    register(_kind)


def blocks_of(model: ModelConfig, layer: int) -> tuple[BlockSpec, ...]:
    """Return the blocks of a layer (0-based), in the order of the forward."""
    placement = "post" if layer in (model.post_norm_layers or ()) else model.norm_placement
    before, after = placement != "post", placement != "pre"
    blocks: list[BlockSpec] = []
    for group in model.block_groups(layer):
        for place, name in enumerate(group):
            slot = KINDS[name].slot
            parallel = model.parallel_block != "none" and len(blocks) > 0
            shares_norm = place > 0 or (parallel and model.parallel_block == "shared_norm")
            norm = INPUT_NORMS[slot] if before and not shares_norm else None
            blocks.append(BlockSpec(name, layer, slot, norm, after, parallel or place > 0))
    return tuple(blocks)


def block_kinds(model: ModelConfig) -> list[BlockKind]:
    """Return the kinds that a model's layers have, in the order of their first block."""
    names = [name for layer in range(layer_count(model)) for name in model.block_names(layer)]
    return [KINDS[name] for name in dict.fromkeys(names)]


def layers_of(model: ModelConfig, kind: str) -> list[int]:
    """Return the layers (0-based) that have a block of a kind, with those of MTP modules."""
    return [layer for layer in range(layer_count(model)) if kind in model.block_names(layer)]


def dispatches_of(model: ModelConfig, layer: int) -> list[Dispatch]:
    """Return what the blocks of a layer (0-based) send over the ranks of `parallel.ep`."""
    dispatches = (KINDS[name].dispatch(model) for name in model.block_names(layer))
    return [dispatch for dispatch in dispatches if dispatch is not None]


def dispatch_of(model: ModelConfig) -> Dispatch | None:
    """Return what the blocks of a model send over the ranks of `parallel.ep`, or None."""
    for layer in range(layer_count(model)):  # up to the first that has one: searches ask often
        for dispatch in dispatches_of(model, layer):
            return dispatch
    return None


def dispatching_layers(model: ModelConfig) -> list[int]:
    """Return the layers (0-based) with blocks that use the ranks of `parallel.ep`, without MTP modules."""
    return [layer for layer in range(model.num_hidden_layers) if dispatches_of(model, layer)]


def replicas(model: ModelConfig, tp: int) -> tuple[int, ...]:
    """Return the numbers of tp ranks, above 1, that hold the same part of a tensor that is split over tp."""
    numbers = {number for kind in block_kinds(model) for number in kind.replicas(model, tp)}
    return tuple(sorted(numbers - {1}))


def outdated_after(model: ModelConfig) -> int | None:
    """Return the length of a row after which generation reads the row again from its start, or None."""
    lengths = (kind.outdated_after(model) for kind in block_kinds(model))
    return min((length for length in lengths if length is not None), default=None)


def stage_starts(model: ModelConfig) -> list[int]:
    """Return the layers (0-based) with which a stage may begin."""
    kinds, layers = block_kinds(model), range(model.num_hidden_layers)
    return [layer for layer in layers if not any(kind.follows(model, layer) for kind in kinds)]


def learns_from_steps(model: ModelConfig) -> bool:
    """Return whether the forward of a step depends on sums of the step before besides its gradients."""
    return any(kind.learns(model) for kind in block_kinds(model))


def windows(model: ModelConfig) -> list[int | None]:
    """Return how many positions back a token looks in each layer, at most; None: to the start."""
    widths: list[int | None] = []
    for layer in range(model.num_hidden_layers):
        own = [KINDS[name].window(model, layer) for name in model.block_names(layer)]
        widths.append(next((window for window in own if window is not None), None))
    return widths

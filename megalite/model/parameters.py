"""The specs of the model's stored parameters, unit by unit, computed from the configuration alone.

Global names: `embedding.weight`, `layers.3.attention.q.weight`, `layers.3.mlp.up.weight`, `norm.weight`,
`head.weight`, or `score.weight` of a reward model. A layer's are those of its blocks
(`blocks/KIND/parameters.py`), each with its norms. MTP modules have the layers after the last one, and
further parameters (`mtp.parameters`). The parameters of adapters follow from these
(`model.adapter_parameters`). Stored names differ where segments are fused: `layers.3.attention.qkv.weight`
has q, k and v, `layers.3.mlp.in.weight` gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megalite.config.mup import base_model
from megalite.config.sections.model import ModelConfig
from megalite.model.kinds import KINDS, blocks_of
from megalite.model.mtp.losses import further_losses, layer_count, module_layers
from megalite.model.mtp.parameters import module_specs
from megalite.model.mup import with_growth
from megalite.model.spec_builder import REWARD, SpecBuilder, one_each
from megalite.model.unit_numbers import head_unit, unit_of
from megalite.parallel.spec import ParamSpec, Segment, parameter_count


def embedding_uses(model: ModelConfig) -> int:
    """Return how often the last stage uses the embedding in a microbatch.

    Each further loss looks up tokens; a tied embedding is also the head of every loss.
    """
    further = further_losses(model)
    return further + (1 + further if model.tied_head else 0)


def embedding_pair(model: ModelConfig, placement: Sequence[int]) -> tuple[int, int] | None:
    """Return the pipeline ranks that store the two copies of the embedding, or None if there is only one.

    Args:
        placement: the rank of each stage. The first stage looks up tokens in the embedding, and the last one
            may use it too.
    """
    first, last = placement[0], placement[-1]
    return (first, last) if embedding_uses(model) and first != last else None


def _embedding(build: SpecBuilder, both_ends: bool) -> list[ParamSpec]:
    """Return the token embedding, learned positions, and the norm of their sum.

    Args:
        both_ends: whether the rank has the last stage, too, which may use the table.
    """
    model, table, uses = build.model, build.vocabulary("embedding.weight"), embedding_uses(build.model)
    tied = uses > 0
    shared = both_ends and tied
    contributions = 1 + uses if shared else 1
    specs = [ParamSpec(table.name, 0, (table,), tied, contributions, both_ends=shared)]
    if model.position == "learned":
        shape = (model.max_position_embeddings, model.hidden_size)
        axis = build.partial_axis
        specs += one_each(0, Segment("positions.weight", shape, grad_partial_axis=axis, init_std=build.std))
    return specs + (build.norm("embedding_norm") if model.embedding_norm else [])


def _layer(build: SpecBuilder, index: int) -> list[ParamSpec]:
    """Return the parameters of a layer's blocks in the order of the forward, each with its norms."""
    specs: list[ParamSpec] = []
    for block in blocks_of(build.model, index):
        if block.input_norm is not None:
            specs += build.norm(f"layers.{index}.{block.input_norm}")
        specs += KINDS[block.kind].specs(build, block)
        if block.output_norm:
            specs += build.norm(f"{block.name}.output_norm")
    return specs


def _head(build: SpecBuilder, holds_embedding: bool) -> list[ParamSpec]:
    """Return the parameters of the final norm, the head and the MTP modules.

    The head of a reward model is one row, whole on each tp rank.

    Where these or a tied head use the embedding on a rank without it, the rank stores a copy, which is
    neither counted nor saved.
    """
    model, unit = build.model, build.unit
    specs = build.norm("norm")
    if model.output_head == "reward":
        specs += build.whole("score.weight", 1, REWARD)
    elif not model.tied_head:
        weight = build.vocabulary("head.weight")
        specs.append(ParamSpec(weight.name, unit, (weight,), contributions=1 + further_losses(model)))
    if (uses := embedding_uses(model)) and not holds_embedding:
        weight = build.vocabulary("embedding.weight", copy=True)
        specs.append(ParamSpec(weight.name, unit, (weight,), tied=True, contributions=uses))
    for index in module_layers(model):
        specs += module_specs(build, index, _layer(build, index))
    return specs


def model_specs(
    model: ModelConfig, *, tp: int = 1, sequence_parallel: bool = False, units: Iterable[int] | None = None
) -> list[ParamSpec]:
    """Return the stored parameters of units (default: all) for a tp size, in the model's order."""
    selected = list(range(head_unit(model) + 1)) if units is None else list(units)
    specs = _specs(model, tp, sequence_parallel, selected)
    return specs if model.mup is None else with_growth(specs, _specs(base_model(model), 1, False, selected))


def _specs(model: ModelConfig, tp: int, sequence_parallel: bool, selected: Sequence[int]) -> list[ParamSpec]:
    last = head_unit(model)
    specs: list[ParamSpec] = []
    for unit in selected:
        build = SpecBuilder(model, unit, tp, sequence_parallel)
        if unit == 0:
            specs += _embedding(build, both_ends=last in selected)
        elif unit == last:
            specs += _head(build, holds_embedding=0 in selected)
        else:
            specs += _layer(build, unit - 1)
    return specs


def weight_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return global name → global shape of all weights of a model, in its order."""
    return {segment.name: segment.shape for spec in model_specs(model) for segment in spec.segments}


def layer_specs(model: ModelConfig, layer: int, tp: int) -> list[ParamSpec]:
    """Return the stored parameters of a layer (0-based) for a tp size."""
    return _layer(SpecBuilder(model, unit_of(model, layer), tp, sequence_parallel=False), layer)


def active_parameters(model: ModelConfig) -> int:
    """Return the number of active parameters per token.

    Of an MoE layer, only the experts that process a token count.
    """
    blocks = (block for layer in range(layer_count(model)) for block in blocks_of(model, layer))
    idle = sum(KINDS[block.kind].idle_parameters(model) for block in blocks)
    return parameter_count(model_specs(model)) - idle

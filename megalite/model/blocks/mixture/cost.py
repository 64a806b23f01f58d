"""The description of a mixture of experts, with equally loaded experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.feed_forward.cost import feed_forward
from megalite.model.cost.recomputed import Group, Operation
from megalite.model.cost.records import BlockCost, Buffer, Elementwise, LocalMatmul, Matmul, Step

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def _local_matmuls(units: Units, slot: str) -> list[LocalMatmul]:
    """Return the router, both matmuls of the experts and those of a latent, for one rank's tokens."""
    model, share = units.model, units.share
    ranks, k, hidden, experts = (
        share.tokens // share.own_tokens,
        model.num_experts_per_tok,
        model.hidden_size,
        model.num_experts or 0,
    )
    width, packed = model.expert_width, (2 if model.gated_mlp else 1) * model.expert_width

    def matmul(name: str, rows: int, outputs: int, inputs: int, matrices: int) -> LocalMatmul:
        lora = units.lora
        rank = lora.rank_of(name) if lora.adapts(name) else 0
        return LocalMatmul(
            f"{slot}.{name}",
            rows,
            outputs,
            inputs,
            outputs * inputs,
            "outputs",
            frozen=bool(lora.rank),
            adapter_rank=rank,
            adapter_weights=rank * (outputs + inputs),
            ranks=ranks,
            matrices=matrices,
            experts=name.startswith("experts"),
            at_least_fp32=name == "router",
        )

    rows, matrices = k * share.own_tokens, experts // share.ep
    return [
        matmul("router", share.own_tokens, experts, hidden, 1),
        matmul("experts.in", rows, packed, model.expert_input, matrices),
        matmul("experts.down", rows, model.expert_input, width, matrices),
        *(
            matmul(name, share.own_tokens, outputs, inputs, 1)
            for latent in ((model.moe_latent_size,) if model.moe_latent_size else ())
            for name, outputs, inputs in (("latent_in", latent, hidden), ("latent_out", hidden, latent))
        ),
    ]


def cost(units: Units, block: BlockSpec, matmuls: Mapping[str, Matmul]) -> BlockCost:
    """Return the description of the block, see `BlockKind.cost`: router, experts and the shared expert.

    It keeps logits and probabilities, the choice of experts, and the rows before and after the experts.
    """
    model, share = units.model, units.share
    own = share.own_tokens * model.expert_input
    router, into, down, *latent = _local_matmuls(units, block.slot)
    forward, backward = (3, 6) if model.gated_mlp else (2, 4)
    inner, sent = into.rows * model.expert_width, into.rows * model.expert_input
    routing = Elementwise(
        kept=(
            Buffer("logits and probabilities", 2 * share.own_tokens * router.outputs, "accumulate"),
            Buffer("weights of the experts", 2 * into.rows, "accumulate"),
            Buffer("the choice", 3 * into.rows, "index"),
        )
    )
    # rows that arrive are sorted by expert, and back before they return
    sorts = share.ep > 1 and share.dispatch == "all_to_all"
    moved = (2 * sent,) * (3 if sorts else 1)
    spread = Elementwise(moved, moved, (Buffer("rows of the experts", sent),))
    activation = Elementwise(
        (forward * inner,),
        (backward * inner,),
        (Buffer("input of the experts' activation", into.rows * into.outputs),),
    )
    summed = own * (share.ep if share.dispatch == "all_gather" else 1)
    returned = [Buffer("rows from the experts", sent)]
    if latent and latent[-1].keeps_input:
        returned.append(Buffer("latent after the experts", own))
    combine = Elementwise((sent + summed,), (2 * sent + summed,), tuple(returned))
    workspace = [Buffer("gradients of the experts", own + 2 * sent + 2 * inner + into.rows * into.outputs)]
    steps: tuple[Step, ...] = (
        router,
        routing,
        *latent[:1],
        spread,
        into,
        activation,
        down,
        combine,
        *latent[1:],
    )
    if f"{block.slot}.shared.in" in matmuls:
        shared = feed_forward(units, matmuls[f"{block.slot}.shared.in"], matmuls[f"{block.slot}.shared.down"])
        gate = LocalMatmul(
            f"{block.slot}.shared_gate",
            share.own_tokens,
            1,
            model.hidden_size,
            model.hidden_size,
            "outputs",
            ranks=router.ranks,
            at_least_fp32=True,
        )
        steps = (*steps, *shared.steps, *((gate,) if model.shared_expert_gate else ()))
        workspace += shared.workspace
    return BlockCost(steps, tuple(workspace), keeps_input=into.keeps_input)


def recomputed(cost: BlockCost) -> list[Group]:
    """Return what the backward can compute again: the whole mixture."""
    kept = tuple(buffer for step in (*cost.steps, cost.after) for buffer in step.kept)
    return [(Operation(("experts",), kept, (*cost.steps, cost.after)),)]

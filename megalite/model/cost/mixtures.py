"""The description of a mixture of experts, with equally loaded experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.model.cost.records import BlockCost, Buffer, Elementwise, LocalMatmul, Matmul

if TYPE_CHECKING:
    from megalite.model.cost.units import Units


def local_matmuls(units: Units) -> list[LocalMatmul]:
    """Return the router and both matmuls of the experts for one rank's tokens."""
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
            f"mlp.{name}",
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
            experts=name != "router",
            at_least_fp32=name == "router",
        )

    rows, matrices = k * share.own_tokens, experts // share.ep
    return [
        matmul("router", share.own_tokens, experts, hidden, 1),
        matmul("experts.in", rows, packed, hidden, matrices),
        matmul("experts.down", rows, hidden, width, matrices),
    ]


def mixture_block(units: Units, matmuls: dict[str, Matmul]) -> BlockCost:
    """Return the description of a mixture: router, experts and the shared expert.

    It keeps logits and probabilities, the choice of experts, and the rows before and after the experts.
    """
    model, share, own = units.model, units.share, units.own
    router, into, down = local_matmuls(units)
    forward, backward = (3, 6) if model.gated_mlp else (2, 4)
    inner, sent = into.rows * model.expert_width, into.rows * model.hidden_size
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
    combine = Elementwise((sent + summed,), (2 * sent + summed,), (Buffer("rows from the experts", sent),))
    workspace = [Buffer("gradients of the experts", own + 2 * sent + 2 * inner + into.rows * into.outputs)]
    steps = (router, routing, spread, into, activation, down, combine)
    before, after = units.around(into, is_first=False)
    if "mlp.shared.in" in matmuls:
        shared = units.feed_forward(matmuls["mlp.shared.in"], matmuls["mlp.shared.down"])
        gate = LocalMatmul(
            "mlp.shared_gate",
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
    return BlockCost(before, steps, after, units.dropped, tuple(workspace))

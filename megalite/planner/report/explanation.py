"""Plans in sentences and tables: what limits the best plan, why the next ones are slower, and the steps to it
from a single GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.config.dims import attention_method
from megalite.config.recompute import shown
from megalite.model.cost.flops import selection_flops
from megalite.model.kinds import dispatch_of
from megalite.planner.cost.expert_exchange import describe_worst_load, worst_expert_bytes
from megalite.planner.cost.state_exchange import describe_state_exchange
from megalite.planner.hardware.constants import ALIKE, INTERVAL, prediction_interval
from megalite.planner.search.best_first import Plan, Search
from megalite.planner.search.run_config import USABLE, apply_layout, first_broken_rule
from megalite.planner.time.step import LayoutChoice, PlannedJob, StepTime
from megalite.system.text import aligned

GIB = 2**30
PARTS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "experts": "sending tokens to their experts",
    "bubble": "waiting in the pipeline",
    "gradients": "reducing gradients",
    "weights": "gathering weights and reducing each microbatch's gradients",
    "optimizer": "the optimizer",
    "nodes": "waiting for the latest node",
    "reference": "the forward of the reference model or the teacher",
}
"""Part of StepTime → its name in sentences."""
COLUMNS = (
    "tp",
    "cp",
    "ep",
    "pp",
    "v",
    "schedule",
    "dp",
    "zero",
    "batch",
    "recompute",
    "offload",
    "GiB",
    "step s",
    "80 %",
    "tokens/s/GPU",
    "MFU",
    "causal",
    "bubble",
)


def selected_rows(job: PlannedJob) -> list[str]:
    """Say what attention to selected rows takes beside dense attention; nothing for models without it."""
    flops = selection_flops(job.model, job.sequence_length)
    if flops is None:
        return []
    return [
        f"Attention to selected rows takes {flops.sparse / 1e9:,.3g} GFLOP per token, indexers included; "
        f"dense attention would take {flops.dense / 1e9:,.3g} GFLOP."
    ]


def amount(size: float) -> str:
    """Format bytes in GiB or MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.1f} MiB"


def describe_layout(choice: LayoutChoice) -> str:
    """Describe a layout in one line."""
    sizes = {"tp": choice.tp, "cp": choice.cp, "pp": choice.pp, "dp": choice.dp}
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["one device"]
    parts += [method(choice)] if choice.cp > 1 else []
    parts += (
        [f"ep{choice.ep}{' by all-gather' if choice.expert_dispatch == 'all_gather' else ''}"]
        if choice.ep > 1
        else []
    )
    if choice.pp > 1:
        parts.append(
            choice.schedule + (f" with {choice.virtual_stages} stages a rank" if choice.asked_stages else "")
        )
    parts += [f"ZeRO-{zero_of(choice)}"] if choice.data > 1 or choice.zero == 3 else []
    parts.append(f"micro-batches of {choice.micro_batch_size}")
    parts += [f"recomputation {shown(choice.recompute)}"] if choice.recompute != "none" else []
    return ", ".join(parts + ([offloaded(choice)] if choice.offload != "none" else []))


def method(choice: LayoutChoice) -> str:
    """Return the method of context parallelism; for a ring of groups, with their size."""
    name = choice.context if choice.context_inner == 1 else f"{choice.context}/{choice.context_inner}"
    return f"{name} of balanced parts" if choice.context_parts == "balanced" else name


def zero_of(choice: LayoutChoice) -> str:
    """Return the ZeRO stage, with the number of ranks if only some of the data ranks share."""
    return str(choice.zero) if choice.dp_shard is None else f"{choice.zero} within {choice.dp_shard}"


def offloaded(choice: LayoutChoice) -> str:
    where = {"cpu": "CPU memory", "disk": "a disk", "none": ""}[choice.offload]
    return f"optimizer state {'and weights ' if choice.offload_parameters else ''}in {where}" if where else ""


def row(job: PlannedJob, plan: Plan) -> tuple[str, ...]:
    """Return a plan as cells under COLUMNS."""
    choice, step = plan.choice, plan.step
    palm, causal = job.mfu(choice, step.total)
    place = choice.offload + ("+weights" if choice.offload_parameters else "")
    cp = f"{choice.cp} {method(choice)}" if choice.cp > 1 else "1"
    ep = f"{choice.ep} {choice.expert_dispatch}" if choice.ep > 1 else "1"
    cells = (
        choice.tp,
        cp,
        ep,
        choice.pp,
        choice.virtual_stages,
        choice.schedule if choice.pp > 1 else "-",
        choice.dp,
        zero_of(choice),
    )
    more = (
        choice.micro_batch_size,
        shown(choice.recompute),
        place,
        f"{plan.memory.total / GIB:.1f}",
        f"{step.total:.4g}",
    )
    sure = "–".join(f"{end:.3g}" for end in prediction_interval(step.total)) if job.device.compared else "-"
    speed = (
        f"{job.tokens_per_second_per_gpu(choice, step.total):,.0f}",
        f"{palm:.1%}",
        f"{causal:.1%}",
        f"{step.bubble_fraction:.1%}",
    )
    return tuple(map(str, (*cells, *more, sure, *speed)))


def table(rows: Sequence[Sequence[str]], heading: Sequence[str] = COLUMNS) -> str:
    """Return rows as aligned text."""
    return "\n".join(aligned([heading, *rows]))


def plan_as_json(job: PlannedJob, plan: Plan, cost: dict[str, float | None]) -> dict[str, Any]:
    """Return a plan as plain data."""
    choice, step = plan.choice, plan.step
    palm, causal = job.mfu(choice, step.total)
    return {
        "tp": choice.tp,
        "cp": choice.cp,
        "context": choice.context if choice.cp > 1 else None,
        "context_inner": choice.context_inner,
        "context_parts": choice.context_parts if choice.cp > 1 else None,
        "ep": choice.ep,
        "expert_dispatch": choice.expert_dispatch if choice.ep > 1 else None,
        "pp": choice.pp,
        "virtual_stages": choice.virtual_stages,
        "schedule": choice.schedule,
        "dp": choice.dp,
        "zero": choice.zero,
        "dp_shard": choice.dp_shard,
        "micro_batch_size": choice.micro_batch_size,
        "microbatches": job.microbatches(choice),
        "recompute": shown(choice.recompute),
        "recomputed": choice.recompute,
        "offload": choice.offload,
        "offload_parameters": choice.offload_parameters,
        "sequence_parallel": choice.sequence_parallel,
        "memory_bytes": plan.memory.total,
        "memory": plan.memory.to_dict(),
        "step_time_s": step.total,
        "step_time_interval_s": list(prediction_interval(step.total)) if job.device.compared else None,
        "step_time_parts_s": step.parts(),
        "bubble_fraction": step.bubble_fraction,
        "tokens_per_second_per_gpu": job.tokens_per_second_per_gpu(choice, step.total),
        "mfu": palm,
        "mfu_palm": palm,
        "mfu_causal": causal,
        **cost,
        "fits": plan.fits,
    }


# --- sentences
# ------------------------------------------------------------------------------------------------------------


def winner(search: Search, plans: Sequence[Plan]) -> list[str]:
    """Describe the best plan: its time and memory, what limits it, and how the next plans compare."""
    best, room = plans[0], search.job.device.memory
    shares = sorted(
        ((value / best.step.total, name) for name, value in best.step.parts().items()), reverse=True
    )
    spent = [f"{PARTS[name]} {share:.1%}" for share, name in shares if share >= 0.005]
    sentences = [
        f"Fastest: {describe_layout(best.choice)}. A step takes {best.step.total:.4g} s: {', '.join(spent)}.",
        f"Its fullest rank takes {amount(best.memory.total)} of {amount(room)}: {memory_parts(best)}.",
        binding(best),
        *imbalance(search, best),
        *uneven_parts(search, best),
        *selected_rows(search.job),
        *of_loading(best),
        *(f"{line}." for line in describe_state_exchange(apply_layout(search.base, best.choice))),
    ]
    if search.rejected is not None:
        rejected = search.plan(search.rejected)
        if rejected.step.total < best.step.total:
            over = f"{amount(rejected.memory.total)}, and {amount(USABLE * room)} are usable"
            sentences.append(
                f"Memory rules out {describe_layout(rejected.choice)}, which would take "
                f"{rejected.step.total:.4g} s: it needs {over}."
            )
    return [*sentences, *ties(search.job, plans), *(loses(best, other) for other in plans[1:3])]


def imbalance(search: Search, plan: Plan) -> list[str]:
    """Describe the memory that the worst load of experts adds to a plan, which assumes equal load."""
    if dispatch_of(search.job.model) is None or plan.choice.ep == 1:
        return []
    config, more = apply_layout(search.base, plan.choice), search.imbalance(plan.choice)
    room, worst = search.job.device.memory - plan.memory.total, describe_worst_load(config)
    return [
        f"That is for equally loaded experts. {worst[0].upper()}{worst[1:]} and keeps "
        f"{amount(worst_expert_bytes(config))} more for each mixture "
        f"and microbatch; {amount(more)} if that happens in all at once: "
        f"{'more than' if more > room else 'within'} the {amount(room)} "
        "that are left."
    ]


def uneven_parts(search: Search, plan: Plan) -> list[str]:
    """Describe the effect of documents on context parallelism with parts of positions."""
    choice, rows = plan.choice, search.job.rows
    zigzag = rows.imbalance(attention_method(choice.context), "zigzag") if choice.cp > 1 else 1.0
    if zigzag == 1.0:
        return []
    balanced, way = (
        rows.imbalance(attention_method(choice.context), "balanced"),
        "parallel.context_parts: balanced",
    )
    chosen = (
        f"{way} makes it {balanced:.2f}"
        if choice.context_parts == "balanced"
        else f"{way} would make it {balanced:.2f}"
    )
    return [
        f"Rows hold documents, so with zigzag parts attention takes {zigzag:.2f} times as long as with equal "
        "shares, if documents are as "
        f"docs/context-parallel.md assumes; {chosen}."
    ]


def ties(job: PlannedJob, plans: Sequence[Plan]) -> list[str]:
    """Describe the accuracy of the predictions, and how many plans are too close to the best to rank."""
    if job.device.compared:
        low, high = prediction_interval(plans[0].step.total)
        sure = [
            f"80 % of published runs are within {INTERVAL:.0%} of their prediction: {low:.4g} to {high:.4g} "
            "s here."
        ]
    else:
        recipe = "" if job.fp8.recipe == "none" else f" with train.fp8: {job.fp8.recipe}"
        sure = [f"No published run on {job.device.name}{recipe} has been compared with a prediction."]
    alike = sum(plan.step.total < plans[0].step.total * (1 + ALIKE) for plan in plans)
    if alike == 1:
        return sure
    many = "The" if alike < len(plans) else "At least the"
    return [
        *sure,
        f"{many} first {alike} plans cannot be told apart: a ratio of two predictions is only known to "
        f"{ALIKE:.0%}. Measure them.",
    ]


def memory_parts(plan: Plan) -> str:
    """List the parts of memory, largest first."""
    memory = plan.memory
    parts = {
        "weights": 0 if plan.choice.offload_parameters else memory.parameters,
        "weights in fp8": 0 if plan.choice.offload_parameters else memory.states.codes,
        "gradients": memory.gradients,
        "optimizer state": 0 if plan.choice.offload != "none" else memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "communication": memory.communication,
        "teacher": memory.teacher,
    }
    listed = sorted(
        ((size, name) for name, size in parts.items() if size >= 0.01 * memory.total), reverse=True
    )
    return ", ".join(f"{name} {amount(size)}" for size, name in listed)


def of_loading(plan: Plan) -> list[str]:
    """Say what reading a quantized base needs."""
    size = plan.memory.loading
    return [f"While a rank reads its base, it needs another {amount(size)} of CPU memory."] if size else []


REMEDIES = {
    "tensor": (
        "Tensor-parallel communication",
        "a smaller tp, or a faster link inside the node, would help most",
    ),
    "context": ("The exchange of context parallelism", "a smaller cp, or one inside a node, would help most"),
    "experts": ("Sending tokens to their experts", "a smaller ep, or one inside a node, would help most"),
    "bubble": (
        "The pipeline bubble",
        "more microbatches, more stages per rank or a smaller pp would help most",
    ),
    "gradients": (
        "The gradient reduction",
        "it is longer than one backward pass, and more microbatches would amortize it",
    ),
    "weights": (
        "ZeRO's communication for each microbatch",
        "it slows the computation down, or takes longer than it",
    ),
    "optimizer": ("The optimizer step", "sharding it further, or a larger batch, would help most"),
    "nodes": ("Waiting for the latest node", "steps are short, and a larger batch would help most"),
    "reference": (
        "The reference model or the teacher",
        "an objective without one (simpo, cpo, orpo; cross_entropy) would save it",
    ),
    "recompute": ("Recomputation", "it runs forwards twice to save the memory of their activations"),
}
"""Part of a step other than computation → its name, and how to reduce it."""


def binding(plan: Plan) -> str:
    """Describe the largest cost other than computation, and how to reduce it."""
    parts = plan.step.parts()
    compute = parts.pop("compute")
    largest = max(parts, key=lambda name: parts[name])
    if parts[largest] < 0.03 * plan.step.total:
        return (
            "Computation is the bottleneck: everything else is small, and only a faster device or larger "
            "matrix products would help."
        )
    cost, remedy = REMEDIES[largest]
    return (
        f"{cost} {'is the bottleneck' if parts[largest] > compute else 'costs most after computation'}: "
        f"{remedy}."
    )


def loses(best: Plan, other: Plan) -> str:
    """Compare a plan with the best: where its extra time is spent, and the difference in memory."""
    more = {name: value - best.step.parts()[name] for name, value in other.step.parts().items()}
    worst = max(more, key=lambda name: more[name])
    slower = other.step.total / best.step.total - 1
    saved = best.memory.total - other.memory.total
    memory = f"{amount(abs(saved))} {'less' if saved > 0 else 'more'}"
    if slower < ALIKE:
        return (
            f"{describe_layout(other.choice)} cannot be told apart from it ({slower:.1%} slower), with "
            f"{memory} memory."
        )
    return (
        f"{describe_layout(other.choice)} is {slower:.1%} slower: {PARTS[worst]} takes {more[worst]:.3g} s "
        f"more, with {memory} memory."
    )


def nothing_fits(search: Search) -> str:
    """Explain why no plan fits, with the layout that needs the least memory."""
    most_shared = ((core, variant) for core in search.cores() for variant in list(search.variants(core))[-1:])
    core, _ = min(most_shared, key=lambda pair: search.bounds.memory(pair[1]))
    least = min(search.variants(core), key=search.bounds.memory)
    memory, device = (plan := search.plan(least)).memory, search.job.device
    if memory.total > search.room:
        shorter = "a shorter --sequence_length, " if memory.total - memory.step < search.room else ""
        need, way = (
            f"{amount(memory.total)} on a rank ({memory_parts(plan)})",
            f"Use more GPUs, {shorter}or a larger device.",
        )
        return (
            f"Nothing fits: even {describe_layout(least)} needs {need}, and {device.name} has "
            f"{amount(device.memory)}. {way}"
        )
    if broken := first_broken_rule(apply_layout(search.base, least), search.gpus):
        return f"Nothing fits: {describe_layout(least)}, which needs the least memory, is refused. {broken}"
    need = f"{amount(memory.host)} of host memory per rank, and {amount(device.host_size)} are assumed"
    return (
        f"Nothing fits: {describe_layout(least)}, which needs the least memory, needs {need}. Use more "
        "GPUs, or --offload disk."
    )


def illegal(search: Search) -> str:
    """Explain why no layout satisfies the user's choices."""
    fixed = search.fixed
    schedule = str(
        fixed.get("schedule", "interleaved" if int(fixed.get("virtual_stages", 1)) > 1 else "1f1b")
    )
    usual = {"pp": 2, "virtual_stages": 2} if schedule == "interleaved" else {}
    names = ("tp", "cp", "pp", "micro_batch_size", "virtual_stages")
    tp, cp, pp, size, stages = (int(fixed.get(name, usual.get(name, 1))) for name in names)
    dp, recompute = (
        int(fixed.get("dp", max(search.gpus // (tp * pp * cp), 1))),
        str(fixed.get("recompute", "none")),
    )
    more: dict[str, Any] = {
        "micro_batch_size": size,
        "recompute": recompute,
        "cp": cp,
        "context": str(fixed.get("context", "ulysses")),
    }
    more |= {"dp_shard": fixed.get("dp_shard"), "zero": int(fixed.get("zero", 1))}
    more |= {
        "ep": int(fixed.get("ep", 1)),
        "sequence_parallel": tp > 1 and dispatch_of(search.job.model) is not None,
    }
    config = apply_layout(search.base, LayoutChoice(tp, pp, dp, schedule, stages, **more))
    if "virtual_stages" in fixed:
        config.parallel.virtual_stages = stages
    broken = first_broken_rule(config, search.gpus)
    chosen = ", ".join(f"{name} = {value}" for name, value in fixed.items()) or "the batch"
    return broken or f"no sizes go with {chosen}. Fix less, or give other --gpus or --global_batch_size."


# --- from one GPU to all of them
# -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """A strategy: its name, its effect on memory, and an example."""

    name: str
    why: str
    choice: LayoutChoice


def ladder(search: Search) -> list[Strategy]:
    """Return strategies from a single device to everything sharded and offloaded on all devices."""
    gpus, node = search.gpus, search.job.device.per_node
    tp = max((size for size in _legal_tp(search) if size <= min(node, gpus)), default=1)
    data = LayoutChoice(dp=gpus, zero=0)
    both = LayoutChoice(
        tp=tp, dp=gpus // tp, sequence_parallel=tp > 1 and search.job.sequence_length % tp == 0
    )
    rungs = [
        Strategy("one GPU", "nothing is sharded, and one device processes the whole batch", LayoutChoice()),
        Strategy("replicas", "weights, gradients and optimizer state are replicated on every GPU", data),
        Strategy("ZeRO-1", "optimizer state is sharded over data-parallel ranks", replace(data, zero=1)),
        Strategy(
            "ZeRO-2", "gradients are sharded too, and reduced for each microbatch", replace(data, zero=2)
        ),
        Strategy("ZeRO-3", "weights are sharded too, and gathered for each use", replace(data, zero=3)),
        Strategy(
            "recomputation",
            "all activations are recomputed in the backward pass",
            replace(data, zero=3, recompute="full"),
        ),
    ]
    if gpus == 1:
        rungs = [rungs[0], Strategy("recomputation", rungs[-1].why, LayoutChoice(recompute="full"))]
    if (ep := _largest_ep(search)) > 1:
        rungs.append(
            Strategy(
                "experts",
                "experts are split inside a node, and tokens are sent to them",
                replace(data, zero=1, ep=ep),
            )
        )
    if tp > 1:
        rungs.append(Strategy("tensor", "layers and their activations are split inside a node", both))
    rungs += [
        Strategy("context", "each rank holds a part of every sequence", choice)
        for choice in _split_rows(search)
    ]
    rungs += [
        Strategy("pipeline", "each stage holds some of the layers", choice)
        for choice in _pipelines(search, both)
    ]
    offload = replace(data if gpus > 1 else LayoutChoice(), recompute="full", offload="cpu")
    rungs.append(
        Strategy(
            "offload", "optimizer state is stored in CPU memory", replace(offload, zero=3 if gpus > 1 else 1)
        )
    )
    rungs.append(
        Strategy(
            "offload all",
            "weights too, fetched layer by layer",
            replace(offload, zero=3, offload_parameters=True),
        )
    )
    rungs.append(
        Strategy(
            "offload to disk",
            "optimizer state is stored on disk",
            replace(offload, zero=3, offload="disk", offload_parameters=True),
        )
    )
    return rungs


def _legal_tp(search: Search) -> list[int]:
    return sorted({core.tp for core in search.cores() if core.pp == 1})


def _largest_ep(search: Search) -> int:
    """Return the largest ep inside a node that divides the experts."""
    dispatch, node = dispatch_of(search.job.model), min(search.gpus, search.job.device.per_node)
    experts = 1 if dispatch is None else dispatch.experts
    return max(ep for ep in range(1, node + 1) if experts % ep == 0 and search.gpus % ep == 0)


def _split_rows(search: Search) -> list[LayoutChoice]:
    """Return a layout with rows split over the ranks of a node, recomputation and everything sharded."""
    cores = [
        core
        for core in search.cores()
        if core.cp > 1 and core.tp == core.pp == 1 and core.recompute == "full"
    ]
    inside = [core for core in cores if core.cp <= search.job.device.per_node]
    return [
        replace(choice, zero=3)
        for choice in sorted(inside, key=lambda core: (-core.cp, core.micro_batch_size))[:1]
    ]


def _pipelines(search: Search, both: LayoutChoice) -> list[LayoutChoice]:
    """Return the shortest legal pipeline with tensor parallelism inside the node."""
    lengths = sorted({core.pp for core in search.cores() if core.pp > 1 and core.tp == both.tp})
    return [replace(both, pp=pp, dp=search.gpus // (both.tp * pp), zero=1) for pp in lengths[:1]]


def walk(search: Search) -> list[str]:
    """Describe each strategy of the ladder for this model: memory, step time, and whether it fits."""
    lines, first = [], True
    for rung in ladder(search):
        if search.job.global_batch_size % rung.choice.dp:
            lines.append(
                f"{rung.name}: {rung.why}. The batch of {search.job.global_batch_size} does not divide over "
                f"dp {rung.choice.dp}."
            )
            continue
        plan = search.plan(rung.choice)
        need = f"{amount(plan.memory.total)} per rank ({memory_parts(plan)})"
        verdict = (
            f"fits, {plan.step.total:.4g} s per step"
            if plan.fits
            else f"does not fit into {amount(search.job.device.memory)}"
        )
        if plan.fits and first:
            verdict, first = f"{verdict}: the first that fits", False
        lines.append(f"{rung.name}: {rung.why}. {need}: {verdict}; {time_parts(plan.step)}.")
    return lines


def time_parts(step: StepTime) -> str:
    """Describe the largest part of a step other than computation."""
    parts = {name: value for name, value in step.parts().items() if name != "compute"}
    largest = max(parts, key=lambda name: parts[name])
    return f"apart from computation, the largest part is {PARTS[largest]}, {parts[largest] / step.total:.1%}"

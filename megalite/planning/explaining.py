"""Plans in sentences and tables: what binds the winner, why the next ones lose, and how one arrives there from a single GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.planning.configuring import broken_rule, configured
from megalite.planning.search import USABLE, Plan, Search
from megalite.planning.step import Choice, Job, StepTime

GIB = 2**30
ALIKE = 0.02  # difference of two predictions that says nothing: they share most of their errors, but not all
PARTS = {
    "compute": "computation",
    "recompute": "forwards that run again",
    "tensor": "tensor-parallel communication",
    "bubble": "waiting in the pipeline",
    "gradients": "reducing gradients",
    "weights": "gathering weights and reducing each microbatch's gradients",
    "optimizer": "the optimizer",
}
"""Part of StepTime → what it is, for people."""
COLUMNS = (
    "tp",
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
    "tokens/s/GPU",
    "MFU",
    "causal",
    "bubble",
)


def amount(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.1f} MiB"


def described(choice: Choice) -> str:
    """A choice in a few words."""
    parts = [f"{name}{size}" for name, size in (("tp", choice.tp), ("pp", choice.pp), ("dp", choice.dp)) if size > 1] or ["one device"]
    if choice.pp > 1:
        parts.append(choice.schedule + (f" with {choice.virtual_stages} stages a rank" if choice.asked_stages else ""))
    parts += [f"ZeRO-{choice.zero}"] if choice.dp > 1 or choice.zero == 3 else []
    parts.append(f"micro-batches of {choice.micro_batch_size}")
    parts += [f"recomputation {choice.recompute}"] if choice.recompute != "none" else []
    return ", ".join(parts + ([offloaded(choice)] if choice.offload != "none" else []))


def offloaded(choice: Choice) -> str:
    where = {"cpu": "CPU memory", "disk": "a disk", "none": ""}[choice.offload]
    return f"optimizer state {'and weights ' if choice.offload_parameters else ''}in {where}" if where else ""


def row(job: Job, plan: Plan) -> tuple[str, ...]:
    """A plan as cells under COLUMNS."""
    choice, step = plan.choice, plan.step
    palm, causal = job.mfu(choice, step.total)
    place = choice.offload + ("+weights" if choice.offload_parameters else "")
    cells = (choice.tp, choice.pp, choice.virtual_stages, choice.schedule if choice.pp > 1 else "-", choice.dp, choice.zero)
    more = (choice.micro_batch_size, choice.recompute, place, f"{plan.memory.total / GIB:.1f}", f"{step.total:.4g}")
    speed = f"{job.tokens_per_second_per_gpu(choice, step.total):,.0f}", f"{palm:.1%}", f"{causal:.1%}", f"{step.bubble_fraction:.1%}"
    return tuple(map(str, (*cells, *more, *speed)))


def table(rows: Sequence[Sequence[str]], heading: Sequence[str] = COLUMNS) -> str:
    """Aligned text."""
    lines = [heading, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heading))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def as_json(job: Job, plan: Plan, cost: dict[str, float | None]) -> dict[str, Any]:
    """A plan as plain data."""
    choice, step = plan.choice, plan.step
    palm, causal = job.mfu(choice, step.total)
    return {
        "tp": choice.tp,
        "pp": choice.pp,
        "virtual_stages": choice.virtual_stages,
        "schedule": choice.schedule,
        "dp": choice.dp,
        "zero": choice.zero,
        "micro_batch_size": choice.micro_batch_size,
        "microbatches": job.microbatches(choice),
        "recompute": choice.recompute,
        "offload": choice.offload,
        "offload_parameters": choice.offload_parameters,
        "sequence_parallel": choice.sequence_parallel,
        "memory_bytes": plan.memory.total,
        "memory": plan.memory.to_dict(),
        "step_time_s": step.total,
        "step_time_parts_s": step.parts(),
        "bubble_fraction": step.bubble_fraction,
        "tokens_per_second_per_gpu": job.tokens_per_second_per_gpu(choice, step.total),
        "mfu": palm,
        "mfu_palm": palm,
        "mfu_causal": causal,
        **cost,
        "fits": plan.fits,
    }


# --- sentences -----------------------------------------------------------------------------------------------------------------


def winner(search: Search, plans: Sequence[Plan]) -> list[str]:
    """What the best plan spends its time and memory on, and what would be better if it could be."""
    best, room = plans[0], search.job.device.memory
    shares = sorted(((value / best.step.total, name) for name, value in best.step.parts().items()), reverse=True)
    spent = [f"{PARTS[name]} {share:.1%}" for share, name in shares if share >= 0.005]
    sentences = [
        f"Fastest: {described(best.choice)}. A step of {best.step.total:.4g} s goes into {', '.join(spent)}.",
        f"Its fullest rank takes {amount(best.memory.total)} of {amount(room)}: {memory_parts(best)}.",
        binding(best),
    ]
    if search.rejected is not None:
        rejected = search.plan(search.rejected)
        if rejected.step.total < best.step.total:
            over = f"{amount(rejected.memory.total)} where {amount(USABLE * room)} may be used"
            sentences.append(
                f"Memory rules out {described(rejected.choice)}, which would take {rejected.step.total:.4g} s: it needs {over}."
            )
    return sentences + [loses(best, other) for other in plans[1:3]]


def memory_parts(plan: Plan) -> str:
    """What memory holds, the largest first."""
    memory = plan.memory
    parts = {
        "weights": 0 if plan.choice.offload_parameters else memory.parameters,
        "gradients": memory.gradients,
        "optimizer state": 0 if plan.choice.offload != "none" else memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "communication": memory.communication,
    }
    listed = sorted(((size, name) for name, size in parts.items() if size >= 0.01 * memory.total), reverse=True)
    return ", ".join(f"{name} {amount(size)}" for size, name in listed)


def binding(plan: Plan) -> str:
    """The largest cost that is not work, and what moves it."""
    advice = {
        "tensor": "The link of tensor parallelism binds: a smaller tp, or a faster link inside the node, would help most.",
        "bubble": "The bubble binds: more microbatches, more stages on a rank or a smaller pp would help most.",
        "gradients": "The reduction of gradients binds: it does not fit beside one backward pass. More microbatches would spread it.",
        "weights": "Data parallelism binds: what ZeRO communicates for each microbatch takes time from its computation, or outlasts it.",
        "optimizer": "The optimizer step binds: sharding it further, or a larger batch, would help most.",
        "recompute": "Recomputation binds: forwards run again, so that their activations need no room.",
    }
    parts = plan.step.parts()
    del parts["compute"]
    largest = max(parts, key=lambda name: parts[name])
    if parts[largest] < 0.03 * plan.step.total:
        return "Compute binds: everything else together is small, and only a faster device or larger products would help."
    return advice[largest]


def loses(best: Plan, other: Plan) -> str:
    """Where a slower plan spends the time that it takes more, and what it saves."""
    more = {name: value - best.step.parts()[name] for name, value in other.step.parts().items()}
    worst = max(more, key=lambda name: more[name])
    slower = other.step.total / best.step.total - 1
    saved = best.memory.total - other.memory.total
    memory = f"{amount(abs(saved))} {'less' if saved > 0 else 'more'}"
    if slower < ALIKE:
        return f"{described(other.choice)} is as fast, as far as a prediction can tell ({slower:.1%} slower), with {memory} memory."
    return f"{described(other.choice)} is {slower:.1%} slower: {PARTS[worst]} takes {more[worst]:.3g} s more, with {memory} memory."


def nothing_fits(search: Search) -> str:
    """Why there is no plan, with the layout that needs least."""
    least = min((variant for core in search.cores() for variant in search.variants(core)), key=search.memory_bound)
    memory, device = (plan := search.plan(least)).memory, search.job.device
    if memory.total > search.room:
        shorter = "a shorter --sequence_length, " if memory.total - memory.step < search.room else ""
        need, way = f"{amount(memory.total)} on a rank ({memory_parts(plan)})", f"Use more GPUs, {shorter}or a larger device."
        return f"Nothing fits: even {described(least)} needs {need}, and {device.name} has {amount(device.memory)}. {way}"
    if broken := broken_rule(configured(search.base, least), search.gpus):
        return f"Nothing fits: {described(least)}, which needs least, is refused. {broken}"
    need = f"{amount(memory.states.host)} of the host's memory for a rank, and there {amount(device.host_size)} are assumed"
    return f"Nothing fits: {described(least)}, which needs least, needs {need}. Use more GPUs, or --offload disk."


def illegal(search: Search) -> str:
    """Why the user's choices leave no layout."""
    fixed = search.fixed
    schedule = str(fixed.get("schedule", "interleaved" if int(fixed.get("virtual_stages", 1)) > 1 else "1f1b"))
    usual = {"pp": 2, "virtual_stages": 2} if schedule == "interleaved" else {}
    tp, pp, size, stages = (int(fixed.get(name, usual.get(name, 1))) for name in ("tp", "pp", "micro_batch_size", "virtual_stages"))
    dp, recompute = int(fixed.get("dp", max(search.gpus // (tp * pp), 1))), str(fixed.get("recompute", "none"))
    config = configured(search.base, Choice(tp, pp, dp, schedule, stages, micro_batch_size=size, recompute=recompute))
    if "virtual_stages" in fixed:
        config.parallel.virtual_stages = stages
    broken = broken_rule(config, search.gpus)
    chosen = ", ".join(f"{name} = {value}" for name, value in fixed.items()) or "the batch"
    return broken or f"no sizes go with {chosen}. Fix less, or give other --gpus or --global_batch_size."


# --- from one GPU to all of them -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """One strategy on the way: what it is called, what it does about memory, and an example of it."""

    name: str
    why: str
    choice: Choice


def ladder(search: Search) -> list[Rung]:
    """From a single device to everything sharded and offloaded on all of them."""
    gpus, node = search.gpus, search.job.device.per_node
    tp = max((size for size in _legal_tp(search) if size <= min(node, gpus)), default=1)
    data = Choice(dp=gpus, zero=0)
    both = Choice(tp=tp, dp=gpus // tp, sequence_parallel=tp > 1 and search.job.sequence_length % tp == 0)
    rungs = [
        Rung("one GPU", "everything is whole, and one device does the whole batch", Choice()),
        Rung("replicas", "weights, gradients and optimizer state are whole on every GPU", data),
        Rung("ZeRO-1", "optimizer state is divided over data parallelism", replace(data, zero=1)),
        Rung("ZeRO-2", "gradients too, reduced for each microbatch", replace(data, zero=2)),
        Rung("ZeRO-3", "weights too, gathered for each use", replace(data, zero=3)),
        Rung("recomputation", "activations are computed again, all of them", replace(data, zero=3, recompute="full")),
    ]
    if gpus == 1:
        rungs = [rungs[0], Rung("recomputation", rungs[-1].why, Choice(recompute="full"))]
    if tp > 1:
        rungs.append(Rung("tensor", "layers are divided inside a node, activations with them", both))
    rungs += [Rung("pipeline", "stages hold some of the layers each", choice) for choice in _pipelines(search, both)]
    offload = replace(data if gpus > 1 else Choice(), recompute="full", offload="cpu")
    rungs.append(Rung("offload", "optimizer state lies in CPU memory", replace(offload, zero=3 if gpus > 1 else 1)))
    rungs.append(Rung("offload all", "weights too, and come layer by layer", replace(offload, zero=3, offload_parameters=True)))
    rungs.append(
        Rung("offload to disk", "and optimizer state on a disk", replace(offload, zero=3, offload="disk", offload_parameters=True))
    )
    return rungs


def _legal_tp(search: Search) -> list[int]:
    return sorted({core.tp for core in search.cores() if core.pp == 1})


def _pipelines(search: Search, both: Choice) -> list[Choice]:
    """With tensor parallelism inside the node, the shortest pipeline that the search may take."""
    lengths = sorted({core.pp for core in search.cores() if core.pp > 1 and core.tp == both.tp})
    return [replace(both, pp=pp, dp=search.gpus // (both.tp * pp), zero=1) for pp in lengths[:1]]


def walk(search: Search) -> list[str]:
    """The ladder with this model's numbers: memory, time, and whether it is enough."""
    lines, first = [], True
    for rung in ladder(search):
        if search.job.global_batch_size % rung.choice.dp:
            lines.append(f"{rung.name}: {rung.why}. The batch of {search.job.global_batch_size} does not divide over dp {rung.choice.dp}.")
            continue
        plan = search.plan(rung.choice)
        need = f"{amount(plan.memory.total)} a rank ({memory_parts(plan)})"
        verdict = f"fits, {plan.step.total:.4g} s a step" if plan.fits else f"does not fit into {amount(search.job.device.memory)}"
        if plan.fits and first:
            verdict, first = f"{verdict}: the first that does", False
        lines.append(f"{rung.name}: {rung.why}. {need}: {verdict}; {time_parts(plan.step)}.")
    return lines


def time_parts(step: StepTime) -> str:
    """The largest part of a step that is not kernels."""
    parts = {name: value for name, value in step.parts().items() if name != "compute"}
    largest = max(parts, key=lambda name: parts[name])
    return f"beside computation most time goes into {PARTS[largest]}, {parts[largest] / step.total:.1%}"

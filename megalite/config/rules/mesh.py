"""Rules for the mesh: sizes divide the model and fill the world."""

import math
from collections.abc import Sequence
from itertools import accumulate

from megalite.config.attention_shapes import AttentionShape
from megalite.config.dims import ParallelDims, shared_evenly, whole_heads
from megalite.config.layer_blocks import EVERY_CONTEXT, LAYER_BLOCKS
from megalite.config.rule import Rule, around, describe_legal, divisors, multiples, show
from megalite.config.rules.context import RuleContext
from megalite.config.rules.mixers import whole_mixers


def legal_tp(c: RuleContext) -> list[int]:
    """Tensor-parallel sizes that the model allows: whole heads, of blocks with a state too, key-value heads
    split or replicated evenly, feed-forward split evenly."""
    shapes, shared = c.model.attention_shapes, c.model.shared_expert_intermediate_size or 0
    heads = math.gcd(*(shape.heads for shape in shapes))
    whole = [tp for tp in divisors(heads) if all(shared_evenly(shape.kv_heads, tp) for shape in shapes)]
    whole = [tp for tp in whole if whole_mixers(c, tp)]
    return [tp for tp in whole if c.model.intermediate_size % tp == shared % tp == 0]


def legal_ulysses(c: RuleContext) -> list[int]:
    """Context-parallel sizes with which each rank attends with whole heads, and key-value heads are split or
    repeated evenly."""
    tp, shapes = c.parallel.tp, c.model.attention_shapes
    heads = math.gcd(*(shape.heads // tp for shape in shapes))
    on_one_rank = [max(shape.kv_heads // tp, 1) for shape in shapes]
    return [cp for cp in divisors(heads) if all(shared_evenly(kv, cp) for kv in on_one_rank)]


def legal_inner(c: RuleContext) -> list[int]:
    """Sizes of the inner groups of a ring: they divide it into several, and have whole heads."""
    return [inner for inner in legal_ulysses(c) if inner < c.parallel.cp and c.parallel.cp % inner == 0]


def _block_without_context(c: RuleContext, context: str) -> str | None:
    """Return a kind of the model's blocks that does not support a value of parallel.context."""
    names = [name for layer in range(c.model.num_hidden_layers) for name in c.model.block_names(layer)]
    return next((n for n in names if n in LAYER_BLOCKS and context not in LAYER_BLOCKS[n].context), None)


def _legal_contexts(c: RuleContext) -> str:
    legal = [context for context in EVERY_CONTEXT if _block_without_context(c, context) is None]
    return f"Legal values: {', '.join(legal)}." if legal else "Set parallel.cp to 1."


def _undivided(c: RuleContext) -> AttentionShape | None:
    """The first shape of attention whose heads parallel.tp does not divide."""
    return next((shape for shape in c.model.attention_shapes if shape.heads % c.parallel.tp), None)


def _uneven_shape(c: RuleContext) -> AttentionShape | None:
    """The first shape of attention whose key-value heads ranks of parallel.tp would not share evenly."""
    shapes = c.model.attention_shapes
    return next((shape for shape in shapes if not shared_evenly(shape.kv_heads, c.parallel.tp)), None)


def _heads_of_layer(c: RuleContext, shape: AttentionShape | None, option: str) -> str:
    """The heads that a message is about: an option, or one of several shapes."""
    assert shape is not None
    if c.model.layer_heads is None and len(c.model.attention_shapes) == 1:
        return f"model.{option} = {show(getattr(c.model, option))}"
    number, what = (
        (shape.heads, "query heads")
        if option == "num_attention_heads"
        else (shape.kv_heads, "key-value heads")
    )
    return f"the {number} {what} of layer {c.model.attention_shapes[shape]}"


def _heads_undivided(c: RuleContext) -> str:
    heads = _heads_of_layer(c, _undivided(c), "num_attention_heads")
    return f"does not divide {heads}: each rank must hold whole heads"


def _kv_uneven(c: RuleContext) -> str:
    heads = _heads_of_layer(c, _uneven_shape(c), "num_key_value_heads")
    return f"neither divides {heads} nor is a multiple of it: key-value heads are split or replicated evenly"


def _heads_for_ulysses(c: RuleContext) -> str:
    tp, shapes = c.parallel.tp, c.model.attention_shapes
    cp = c.parallel.cp if c.parallel.context == "ulysses" else c.parallel.context_inner

    def over_cp(shape: AttentionShape) -> bool:
        return whole_heads(shape.heads // tp, max(shape.kv_heads // tp, 1), cp)

    shape = next((each for each in shapes if not over_cp(each)), next(iter(shapes)))
    heads = f"heads / tp = {shape.heads // tp}"
    kv = f"key-value heads / tp = {max(shape.kv_heads // tp, 1)}"
    return (
        f"is incompatible with {heads} and {kv}: with parallel.context = ulysses each rank computes whole "
        "heads "
        "of every sequence"
    )


def _example_partition(c: RuleContext) -> str:
    layers, stages = c.model.num_hidden_layers, c.dims.stages
    each, rest = divmod(layers, stages)
    return (
        f"For {layers} layers on {stages} stages, for example: "
        f"{[each + (stage < rest) for stage in range(stages)]}."
    )


def _starts(c: RuleContext) -> list[int]:
    """The layers (0-based) at which a stage may begin: no selection of rows is sent to them."""
    return [layer for layer in range(c.model.num_hidden_layers) if not c.model.selects_before(layer)]


def _wrong_start(c: RuleContext) -> int | None:
    """The first layer at which a stage of parallel.partition begins and may not."""
    first = list(accumulate(c.parallel.partition or (), initial=0))[:-1]
    return next((layer for layer in first if layer not in _starts(c)), None)


def _too_many_stages(c: RuleContext) -> str:
    layers = f"model.num_hidden_layers = {c.model.num_hidden_layers}: each stage holds at least one layer"
    return f"makes {c.dims.stages} stages under parallel.schedule = {c.parallel.schedule}, but {layers}"


def _legal_pp(c: RuleContext) -> Sequence[int] | str:
    return (
        range(1, c.model.num_hidden_layers // c.dims.virtual_stages + 1) or "Choose parallel.schedule 1f1b."
    )


def _sizes(c: RuleContext) -> str:
    return f"tp * pp * cp = {c.parallel.tp} * {c.parallel.pp} * {c.parallel.cp} = {c.dims.replica}"


def _processes(c: RuleContext) -> str:
    return f"the run's {c.world_size} process{'es' if c.world_size > 1 else ''}"


def _sizes_do_not_fit(c: RuleContext) -> str:
    how = "exceeds" if c.dims.replica > c.world_size else "does not divide"
    return f"makes {_sizes(c)}, which {how} {_processes(c)}"


def _legal_dp(c: RuleContext) -> Sequence[int] | str:
    ranks, world = c.dims.replica, c.world_size
    if world % ranks == 0:
        return [world // ranks]
    starts, products = around(world, ranks), ", ".join(map(str, divisors(world)))
    start = f"Start {' or '.join(map(str, starts))} processes (on one machine --nproc {starts[-1]})"
    return f"{start}, or choose tp, pp and cp so that their product divides {world}: {products}."


def _sizes_fit_the_world(axis: str) -> Rule:
    """The rule for a run without parallel.dp, which no dp fits: the largest of tp, pp and cp is named."""
    sizes = ("tp", "pp", "cp")  # of equal ones the first
    return Rule(
        f"{axis} fits the world",
        f"parallel.{axis}",
        lambda c: (
            c.parallel.dp is None
            and c.world_size % c.dims.replica
            and max(sizes, key=vars(c.parallel).__getitem__) == axis
        ),
        message=_sizes_do_not_fit,
        legal=_legal_dp,
    )


def _sharded_in_groups(dims: ParallelDims) -> bool:
    """Whether ZeRO shards over some of the ranks that sum a gradient; with experts, also if those of an
    expert are in several groups."""
    return dims.shard not in (1, dims.data) or dims.experts and dims.expert_shard not in (1, dims.expert_data)


def _legal_ep(c: RuleContext) -> list[int]:
    """Sizes that divide the experts and the ranks of a stage, and leave a whole number of ranks for each
    bucket of experts."""
    shared = c.dims.shard * c.parallel.tp if c.parallel.zero else c.dims.stage_ranks
    return [
        ep for ep in divisors(c.model.num_experts or 1) if c.dims.stage_ranks % ep == 0 and shared % ep == 0
    ]


_EXPERTS = (
    Rule(
        "ep splits experts",
        "parallel.ep",
        lambda c: c.parallel.ep > 1 and not c.model.num_experts,
        message="requires experts, but {model.num_experts}",
        legal=[1],
    ),
    Rule(
        "ep divides the experts",
        "parallel.ep",
        lambda c: c.model.num_experts and c.model.num_experts % c.parallel.ep,
        message="does not divide {model.num_experts}: each rank must hold whole experts",
        legal=_legal_ep,
    ),
    Rule(
        "ep divides a stage",
        "parallel.ep",
        lambda c: c.dims.stage_ranks % c.parallel.ep,
        message=lambda c: f"does not divide the {c.dims.stage_ranks} ranks of a stage, dp * cp * tp",
        legal=_legal_ep,
    ),
    Rule(
        "experts are sharded over whole groups",
        "parallel.ep",
        lambda c: c.model.num_experts and c.parallel.zero and c.dims.shard * c.parallel.tp % c.parallel.ep,
        message=lambda c: (
            f"does not divide dp_shard * cp * tp = {c.dims.shard * c.parallel.tp}: an expert is sharded over "
            "the ranks of a shard group "
            "that hold it"
        ),
        legal=_legal_ep,
    ),
    Rule(
        "experts need a split sequence",
        "parallel.sequence_parallel",
        lambda c: c.model.num_experts and c.parallel.tp > 1 and not c.parallel.sequence_parallel,
        message="is incompatible with {model.num_experts} and {parallel.tp}: every tp rank would route the "
        "same "
        "tokens",
        legal="Set it to true, or parallel.tp to 1.",
    ),
    Rule(
        "tp divides the shared expert",
        "parallel.tp",
        lambda c: (c.model.shared_expert_intermediate_size or 0) % c.parallel.tp,
        message="does not divide {model.shared_expert_intermediate_size}: all ranks must hold parts of the "
        "same size",
        legal=legal_tp,
    ),
)

RULES: tuple[Rule, ...] = (
    *_EXPERTS,
    Rule(
        "tp divides heads",
        "parallel.tp",
        _undivided,
        message=_heads_undivided,
        legal=legal_tp,
    ),
    Rule(
        "tp fits key-value heads",
        "parallel.tp",
        _uneven_shape,
        message=_kv_uneven,
        legal=legal_tp,
    ),
    Rule(
        "tp divides the feed-forward",
        "parallel.tp",
        lambda c: c.model.intermediate_size % c.parallel.tp,
        message="does not divide {model.intermediate_size}: all ranks must hold parts of the same size",
        legal=legal_tp,
    ),
    Rule(
        "sequence_parallel divides the sequence",
        "data.sequence_length",
        # parts are padded
        lambda c: (
            c.parallel.cp == 1 and c.parallel.sequence_parallel and c.data.sequence_length % c.parallel.tp
        ),
        message="is not a multiple of {parallel.tp}, as required by parallel.sequence_parallel",
        legal=lambda c: multiples(c.data.sequence_length, c.parallel.tp),
    ),
    Rule(
        "blocks support context parallelism",
        "parallel.context",
        lambda c: c.parallel.cp > 1 and _block_without_context(c, c.parallel.context),
        message=lambda c: (
            f"is not supported by {_block_without_context(c, c.parallel.context)}, a kind of block in "
            f"model.layer_blocks, with parallel.cp = {c.parallel.cp}"
        ),
        legal=_legal_contexts,
    ),
    Rule(
        "ulysses divides heads",
        "parallel.cp",
        lambda c: (
            c.parallel.context == "ulysses" and c.parallel.cp > 1 and c.parallel.cp not in legal_ulysses(c)
        ),
        message=_heads_for_ulysses,
        legal=lambda c: (
            f"{describe_legal(c.parallel.cp, legal_ulysses(c))} "
            "Or set parallel.context to gather, ring or auto."
        ),
    ),
    Rule(
        "inner ranks divide the ring",
        "parallel.context_inner",
        lambda c: (
            c.parallel.context_inner > 1 and c.parallel.context_inner not in divisors(c.parallel.cp)[:-1]
        ),
        message="does not divide {parallel.cp} into several groups of whole ranks: one group alone is "
        "parallel.context = ulysses",
        legal=legal_inner,
    ),
    Rule(
        "inner ranks divide heads",
        "parallel.context_inner",
        lambda c: c.parallel.context == "ring" and c.parallel.context_inner not in (1, *legal_ulysses(c)),
        message=lambda c: _heads_for_ulysses(c).replace(
            "under parallel.context = ulysses each", "each inner"
        ),
        legal=legal_inner,
    ),
    Rule(
        "virtual stages belong to the schedule",
        "parallel.virtual_stages",
        lambda c: c.parallel.virtual_stages not in (None, c.dims.virtual_stages),
        message=lambda c: (
            f"does not match parallel.schedule = {c.parallel.schedule}, which requires "
            f"{c.dims.virtual_stages}"
        ),
        legal="Remove it, or set parallel.schedule to interleaved.",
    ),
    Rule(
        "a layer for each stage",
        "parallel.pp",
        lambda c: c.dims.stages > c.model.num_hidden_layers,
        message=_too_many_stages,
        legal=_legal_pp,
    ),
    Rule(
        "partition has a number for each stage",
        "parallel.partition",
        lambda c: c.parallel.partition is not None and len(c.parallel.partition) != c.dims.stages,
        message=lambda c: f"has {len(c.parallel.partition or [])} entries for {c.dims.stages} stages",
        legal=_example_partition,
    ),
    Rule(
        "partition leaves no stage empty",
        "parallel.partition",
        lambda c: c.parallel.partition and min(c.parallel.partition) < 1,
        message="assigns no layer to a stage",
        legal=_example_partition,
    ),
    Rule(
        "partition holds every layer",
        "parallel.partition",
        lambda c: c.parallel.partition and sum(c.parallel.partition) != c.model.num_hidden_layers,
        message=lambda c: (
            f"contains {sum(c.parallel.partition or [])} layers, but model.num_hidden_layers = "
            f"{c.model.num_hidden_layers}"
        ),
        legal=_example_partition,
    ),
    Rule(
        "stages begin where an indexer selects",
        "parallel.partition",
        lambda c: c.parallel.partition and _wrong_start(c) is not None,
        message=lambda c: (
            f"begins a stage at layer {_wrong_start(c)}, from which on attention first takes rows that an "
            "earlier layer has selected (model.indexer_types): selections are not sent to other stages"
        ),
        legal=lambda c: f"Begin stages at layers {', '.join(map(str, _starts(c)))}, or remove it.",
    ),
    Rule(
        "enough layers where an indexer selects",
        "parallel.pp",
        lambda c: c.parallel.partition is None and c.dims.stages > len(_starts(c)),
        message=lambda c: (
            f"makes {c.dims.stages} stages, but only {len(_starts(c))} layers may begin one: from the others "
            "on attention first takes rows that an earlier layer has selected (model.indexer_types)"
        ),
        legal=lambda c: range(1, len(_starts(c)) // c.dims.virtual_stages + 1),
    ),
    Rule(
        "a cost for each part",
        "parallel.layer_costs",
        lambda c: (
            c.parallel.layer_costs is not None
            and len(c.parallel.layer_costs) != c.model.num_hidden_layers + 2
        ),
        message=lambda c: (
            f"has {len(c.parallel.layer_costs or [])} entries, but model.num_hidden_layers = "
            f"{c.model.num_hidden_layers}"
        ),
        legal=lambda c: (
            f"Expected {c.model.num_hidden_layers + 2} numbers: for the embedding, each layer, and the head."
        ),
    ),
    *map(_sizes_fit_the_world, ("tp", "pp", "cp")),
    Rule(
        "the mesh fills the world",
        "parallel.dp",
        lambda c: (
            c.world_size % c.dims.replica == 0 if c.parallel.dp is None else c.dims.world != c.world_size
        ),
        message=lambda c: f"does not fill {_processes(c)} with {_sizes(c)}",
        legal=_legal_dp,
    ),
    Rule(
        "dp_shard divides dp",
        "parallel.dp_shard",
        lambda c: c.parallel.dp_shard and c.dims.data % c.parallel.dp_shard,
        message=lambda c: (
            f"does not divide dp * cp = {c.dims.dp} * {c.dims.cp} = {c.dims.data}: each group holds whole "
            "shards"
        ),
        legal=lambda c: divisors(c.dims.data),
    ),
    Rule(
        "bf16 reduction of wider gradients",
        "parallel.reduce_dtype",
        lambda c: c.parallel.reduce_dtype == c.train.grad_dtype == "bf16",
        message="has no effect: gradients are already sent as bf16 with {train.grad_dtype}",
        legal="Remove one of the two; train.grad_dtype = fp32 accumulates microbatches in fp32.",
    ),
    Rule(
        "no proof in bf16",
        "parallel.reduce_dtype",
        lambda c: c.parallel.reduce_dtype == "bf16" and c.train.precision == "fp64",
        message="would reduce the precision of {train.precision}",
        legal="Set it to fp32 (here fp64 is sent as fp64), or train.precision to fp32, bf16 or fp16.",
    ),
    Rule(
        "PowerSGD reduces over all of dp",
        "parallel.powersgd_rank",
        lambda c: c.parallel.powersgd_rank and _sharded_in_groups(c.dims),
        message="reduces over all data-parallel ranks at once, and is not supported with {parallel.dp_shard}",
        legal="Remove one of the two.",
    ),
    Rule(
        "PowerSGD keeps fp32 errors",
        "parallel.powersgd_rank",
        lambda c: c.parallel.powersgd_rank and c.train.grad_dtype == "bf16",
        message="adds small error terms to the gradients, which {train.grad_dtype} would lose",
        legal="Set train.grad_dtype to fp32, or remove powersgd_rank.",
    ),
)

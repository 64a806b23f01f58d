"""Rules for train.graphs: what a CUDA graph of a stage's forward and backward can contain.

A replay repeats the same kernels with the same numbers on the same memory, and executes no Python. So nothing
in a stage may depend on numbers of the host that change between microbatches, on memory that moves, on sizes
that depend on data, or on code that runs on the host (`parallel.pipeline.graphed_runtime`).
"""

from collections.abc import Callable
from typing import Any

from megalite.config.layer_blocks import blocks_in
from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext
from megalite.config.token_files import is_chat, prefixes

WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved")
"""The schedules that do not split the backward."""
GRAPHED_BLOCKS = ("attention", "latent_attention", "feed_forward")
"""The kinds of blocks that do the same on the device for every microbatch."""


def _excludes(option: str, is_set: Callable[[RuleContext], Any], reason: str, way_out: str) -> Rule:
    """Return the rule that train.graphs is not supported with the value of an option.

    Args:
        way_out: what to do other than setting train.graphs to false.
    """
    return Rule(
        f"graphs and {option}",
        "train.graphs",
        lambda c: c.train.graphs and is_set(c),
        message=f"is not supported with {{{option}}}, because {reason}",
        legal=f"Set it to false, or {way_out}.",
    )


def _no_dropout(option: str) -> Rule:
    section, name = option.split(".")
    return _excludes(
        option,
        lambda c: getattr(getattr(c, section), name),
        "a replay would repeat the dropout masks of the recorded step",
        f"{option} to 0",
    )


def _other_block(c: RuleContext) -> str | None:
    """Return a kind of block in model.layer_blocks that graphs do not support."""
    names = (name for entry in c.model.layer_blocks or () for name in blocks_in(entry))
    return next((name for name in names if name not in GRAPHED_BLOCKS), None)


_WAITS = "the host starts and awaits the collectives inside a stage, which a replay does not"

RULES: tuple[Rule, ...] = (
    Rule(
        "graphs on a GPU",
        "train.graphs",
        lambda c: c.train.graphs and c.local_devices == 0,
        message="requires a GPU, but this run does not use one",
        legal="Set it to false.",
    ),
    _excludes("parallel.tp", lambda c: c.parallel.tp > 1, _WAITS, "parallel.tp to 1"),
    _excludes("parallel.cp", lambda c: c.parallel.cp > 1, _WAITS, "parallel.cp to 1"),
    _excludes(
        "parallel.zero",
        lambda c: c.parallel.zero > 1 and (c.dims.shard > 1 or c.parallel.offload_parameters),
        "gradients or weights then move in memory in every step",
        "parallel.zero to 1",
    ),
    _excludes(
        "parallel.offload",
        lambda c: c.parallel.offload != "none",
        "the host then waits for the device in every step",
        "parallel.offload to none",
    ),
    _excludes(
        "faults.recheck",
        lambda c: c.faults.recheck is not None,
        "digests are not recorded",
        "faults.recheck to null",
    ),
    _excludes(
        "parallel.schedule",
        lambda c: c.parallel.schedule not in WHOLE_BACKWARDS,
        "its weight passes are not recorded",
        "parallel.schedule to 1f1b",
    ),
    _excludes(
        "model.num_experts",
        lambda c: c.model.num_experts is not None,
        "the sizes of an expert's matmuls depend on the router",
        "train a dense model",
    ),
    Rule(
        "graphs of known blocks",
        "train.graphs",
        lambda c: c.train.graphs and c.model.num_experts is None and _other_block(c),
        message=lambda c: (
            f"is not supported with {_other_block(c)}, a kind of block in model.layer_blocks, because it may "
            "compute on the host"
        ),
        legal="Set it to false.",
    ),
    _excludes(
        "model.index_topk",
        lambda c: c.model.index_topk is not None,
        "rows are selected anew for every microbatch",
        "train a model without an indexer",
    ),
    _excludes(
        "model.mtp_layers",
        lambda c: c.model.mtp_layers,
        "the factors of the modules' losses change in every step",
        "model.mtp_layers to 0",
    ),
    *map(
        _no_dropout,
        ("model.embedding_dropout", "model.attention_dropout", "model.residual_dropout", "lora.dropout"),
    ),
    _excludes(
        "data.reset_positions",
        lambda c: c.data.reset_positions,
        "a replay would use the documents of the recorded microbatch",
        "data.reset_positions to false",
    ),
    _excludes(
        "data.train",
        lambda c: any(map(is_chat, prefixes(c.data.train))),
        "a replay would use the conversations of the recorded microbatch",
        "train on text",
    ),
    _excludes(
        "train.fp8",
        lambda c: c.train.fp8 != "none",
        "the host decides when weights are quantized again",
        "train.fp8 to none",
    ),
    _excludes(
        "train.compile",
        lambda c: c.train.compile,
        "functions could be compiled while a graph is recorded",
        "train.compile to false",
    ),
    _excludes(
        "train.recompute",
        lambda c: c.train.recompute == "budget",
        "a memory budget does not include the memory of graphs",
        "choose what is recomputed, such as selective",
    ),
    _excludes(
        "logging.loss_by_source",
        lambda c: c.logging.loss_by_source,
        "a replay does not add up the losses of a row",
        "logging.loss_by_source to false",
    ),
)

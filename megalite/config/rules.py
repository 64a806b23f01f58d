"""Every check between fields of a configuration: one row a rule, in the order in which they are tried.

The first rows make sizes positive, so that later rows may divide by them. A message names option, value, reason and way out:

    parallel.tp = 6 does not divide model.num_attention_heads = 32: each rank must hold whole heads.
    Legal values: 1, 2, 4, 8, 16, 32. Nearest: 4 or 8.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from megalite.config.rule import Facts, Rule, bounded, is_checkpoint, nearest_name
from megalite.config.schema import ROPE_SCALING_KEYS, Config, ConfigError
from megalite.config.token_files import data_vocab_size, prefixes, token_file

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def check(config: Config, world_size: int, local_devices: int | None = None) -> None:
    """Raise ConfigError with the first rule that a resolved configuration violates.

    world_size: number of processes; local_devices: GPUs that this machine's processes will use (0: CPU; None: not known yet).
    """
    values = {section.name: getattr(config, section.name) for section in fields(Config)}
    facts = Facts(**values, world_size=world_size, local_devices=local_devices)
    for rule in RULES:
        if rule.broken(facts):
            raise ConfigError(rule.message(facts))


def duration_seconds(text: str) -> int | None:
    """Seconds of a duration such as 3h50m, 90m or 30s; None where it is not one."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 3600 * hours + 60 * minutes + seconds


def _all_prefixes(c: Config) -> list[str]:
    return prefixes(c.data.train) + prefixes(c.data.validation)


def _missing(source: Any) -> list[str]:
    return [f"{p}{end}" for p in prefixes(source) for end in (".bin", ".idx") if not Path(f"{p}{end}").is_file()]


def _nearest_prefix(source: Any) -> str:
    prefix = Path(_missing(source)[0]).with_suffix("")
    others = sorted(str(path.with_suffix("")) for path in prefix.parent.glob("*.bin"))
    if not others:
        return f"Make it with tools/prepare_data.py --output {prefix}."
    return f"Nearest: {nearest_name(str(prefix), others)}."


def _token_file_rules(option: str) -> tuple[Rule, Rule]:
    get = attrgetter(option)
    return (
        Rule(
            f"{option} weights are positive",
            option,
            broken=lambda c: isinstance(get(c), dict) and not all(math.isfinite(w) and w > 0 for w in get(c).values()),
            why="has a weight that is not a positive number",
            legal="Give every prefix a weight above 0, or remove it.",
        ),
        Rule(
            f"{option} exists",
            option,
            broken=lambda c: _missing(get(c)),
            why=lambda c: f"is not there: no {' and no '.join(_missing(get(c)))}",
            legal=lambda c: _nearest_prefix(get(c)),
        ),
    )


def _end_of_document_rule(option: str) -> Rule:
    def without(c: Facts) -> list[str]:
        return [prefix for prefix in _all_prefixes(c) if token_file(prefix).eos is None]

    return Rule(
        f"{option} needs an end-of-document token",
        option,
        broken=lambda c: attrgetter(option)(c) and without(c),
        why=lambda c: f"needs an EOS token, and {without(c)[0]}.json names none",
        legal='Set it to false, or write {"vocab_size": V, "eos": ID} into that file.',
    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def around(value: int, step: int) -> list[int]:
    """The multiples of step next to value, at least one step."""
    below = value // step * step
    return [multiple for multiple in (below, below + step) if multiple > 0]


def legal_tp(c: Facts) -> list[int]:
    """Tensor-parallel sizes that the model allows: whole heads, key-value heads divided or replicated evenly, even feed-forward."""
    kv = c.model.kv_heads
    return [tp for tp in divisors(c.model.num_attention_heads) if c.model.intermediate_size % tp == 0 and (kv % tp == 0 or tp % kv == 0)]


def _example_partition(c: Facts) -> str:
    layers, (each, rest) = c.model.num_hidden_layers, divmod(c.model.num_hidden_layers, c.parallel.pp)
    return f"For {layers} layers on {c.parallel.pp} stages, for example: {[each + (stage < rest) for stage in range(c.parallel.pp)]}."


def _mesh(c: Facts) -> str:
    return f"tp * pp * cp = {c.parallel.tp} * {c.parallel.pp} * {c.parallel.cp} = {_model_ranks(c)}"


def _model_ranks(c: Facts) -> int:
    return c.parallel.tp * c.parallel.pp * c.parallel.cp


def _legal_dp(c: Facts) -> Sequence[int] | str:
    ranks, world = _model_ranks(c), c.world_size
    if world % ranks == 0:
        return [world // ranks]
    starts = " or ".join(map(str, around(world, ranks)))
    return (
        f"Start {starts} processes, or choose tp, pp and cp so that their product divides {world}: {', '.join(map(str, divisors(world)))}."
    )


def _bad_indices(layers: list[int] | None, count: int) -> bool:
    return layers is not None and (len(set(layers)) < len(layers) or not all(0 <= layer < count for layer in layers))


def _scaling_problem(c: Facts) -> str | None:
    """Why the values of rope_scaling can not be used; its type is known."""
    scaling = dict(c.model.rope_scaling or {})
    kind = scaling.pop("rope_type", "default")
    required = ROPE_SCALING_KEYS[kind]
    if set(scaling) != set(required):
        return f"does not have the keys of rope_type {kind}"
    if not all(isinstance(v, (int, float)) and math.isfinite(v) and v > 0 for v in scaling.values()):
        return "holds a value that is not a positive number"
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        return "has high_freq_factor <= low_freq_factor, between which it interpolates"
    return None


def _scaling_example(c: Facts) -> str:
    kind = (c.model.rope_scaling or {}).get("rope_type", "default")
    return f"Write {{{', '.join([f'rope_type: {kind}', *(f'{key}: N' for key in ROPE_SCALING_KEYS[kind])])}}}, every N a positive number."


_SIZES = {
    "parallel": "tp pp dp cp",
    "model": "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings sliding_window",
    "data": "sequence_length",
    "train": "steps global_batch_size micro_batch_size",
    "optimizer": "base_batch_size",
    "checkpoint": "interval keep",
    "validation": "interval batches",
    "logging": "interval",
}
_POSITIVE = {
    "model": "rope_theta rms_norm_eps attention_scale attention_softcap logit_softcap embedding_scale initializer_range",
    "parallel": "bucket_mb",
    "optimizer": "eps",
}
_NOT_NEGATIVE = {"run": "seed", "train": "grad_clip z_loss", "optimizer": "lr min_lr warmup_steps weight_decay"}
_FRACTIONS = {"model": "embedding_dropout attention_dropout residual_dropout", "train": "label_smoothing", "optimizer": "betas"}

RULES: tuple[Rule, ...] = (
    *bounded(_SIZES, lambda n: n >= 1, "is not a positive size", "Legal values: 1 and above. Nearest: 1."),
    *bounded(_POSITIVE, lambda n: n > 0, "is not a positive number", "Legal values: every number above 0."),
    *bounded(_NOT_NEGATIVE, lambda n: n >= 0, "is negative or not finite", "Legal values: 0 and above. Nearest: 0."),
    *bounded(_FRACTIONS, lambda n: 0 <= n < 1, "is not at least 0 and below 1", "Legal values: from 0 up to, but without, 1."),
    *bounded({"optimizer": "wsd_decay_fraction"}, lambda n: 0 < n <= 1, "is not a share of the steps", "Legal values: above 0, up to 1."),
    Rule(
        "run.name is a directory name",
        "run.name",
        broken=lambda c: c.run.name in ("", ".", "..") or "/" in c.run.name,
        why="is not the name of one directory",
        legal="Choose a name without /, and put the path into run.dir.",
    ),
    # model
    Rule(
        "preset or from_hf",
        "model.from_hf",
        broken=lambda c: c.model.from_hf and c.model.preset,
        why=lambda c: f"and model.preset = {c.model.preset} both give the shape",
        legal="Remove one of the two.",
    ),
    Rule(
        "init_from exists",
        "model.init_from",
        broken=lambda c: c.model.init_from is not None and not is_checkpoint(c.model.init_from),
        why="is not a checkpoint: it has no state.json",
        legal="Give a checkpoint directory, for example runs/NAME/checkpoints/step_00000100.",
    ),
    Rule(
        "hidden size over heads",
        "model.num_attention_heads",
        broken=lambda c: c.model.head_dim is None and c.model.hidden_size % c.model.num_attention_heads,
        why=lambda c: f"does not divide model.hidden_size = {c.model.hidden_size}, and model.head_dim is not given",
        legal=lambda c: divisors(c.model.hidden_size),
    ),
    Rule(
        "heads over key-value heads",
        "model.num_key_value_heads",
        broken=lambda c: c.model.num_attention_heads % c.model.kv_heads,
        why=lambda c: (
            f"does not divide model.num_attention_heads = {c.model.num_attention_heads}: each is shared by equally many query heads"
        ),
        legal=lambda c: divisors(c.model.num_attention_heads),
    ),
    Rule(
        "even head width for rope",
        "model.head_dim",
        broken=lambda c: c.model.position == "rope" and c.model.head_size % 2,
        value=lambda c: c.model.head_size,
        why="is odd: rotary embeddings (model.position = rope) turn pairs of channels",
        legal=lambda c: around(c.model.head_size, 2),
    ),
    Rule(
        "rope_scaling needs rope",
        "model.rope_scaling",
        broken=lambda c: c.model.rope_scaling and c.model.position != "rope",
        why=lambda c: f"has nothing to scale: model.position = {c.model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "rope_scaling type",
        "model.rope_scaling.rope_type",
        broken=lambda c: c.model.rope_scaling is not None and c.model.rope_scaling.get("rope_type") not in ROPE_SCALING_KEYS,
        value=lambda c: (c.model.rope_scaling or {}).get("rope_type"),
        why="is not a known kind of rotary scaling",
        legal=lambda c: list(ROPE_SCALING_KEYS),
    ),
    Rule("rope_scaling values", "model.rope_scaling", _scaling_problem, lambda c: _scaling_problem(c) or "", _scaling_example),
    Rule(
        "no_rope_layers exist",
        "model.no_rope_layers",
        broken=lambda c: _bad_indices(c.model.no_rope_layers, c.model.num_hidden_layers),
        why="does not name different layers of this model",
        legal=lambda c: f"Legal entries: 0 to {c.model.num_hidden_layers - 1}, each once.",
    ),
    Rule(
        "no_rope_layers needs rope",
        "model.no_rope_layers",
        broken=lambda c: c.model.no_rope_layers and c.model.position != "rope",
        why=lambda c: f"has no effect: model.position = {c.model.position}",
        legal="Remove it, or set model.position to rope.",
    ),
    Rule(
        "sliding_window_layers exist",
        "model.sliding_window_layers",
        broken=lambda c: _bad_indices(c.model.sliding_window_layers, c.model.num_hidden_layers),
        why="does not name different layers of this model",
        legal=lambda c: f"Legal entries: 0 to {c.model.num_hidden_layers - 1}, each once.",
    ),
    Rule(
        "sliding_window_layers needs a window",
        "model.sliding_window_layers",
        broken=lambda c: c.model.sliding_window_layers is not None and c.model.sliding_window is None,
        why="has no effect: model.sliding_window is not given",
        legal="Remove it, or give model.sliding_window.",
    ),
    # parallel
    Rule(
        "tp divides heads",
        "parallel.tp",
        broken=lambda c: c.model.num_attention_heads % c.parallel.tp,
        why=lambda c: f"does not divide model.num_attention_heads = {c.model.num_attention_heads}: each rank must hold whole heads",
        legal=legal_tp,
    ),
    Rule(
        "tp fits key-value heads",
        "parallel.tp",
        broken=lambda c: c.model.kv_heads % c.parallel.tp and c.parallel.tp % c.model.kv_heads,
        why=lambda c: (
            f"neither divides model.num_key_value_heads = {c.model.kv_heads} nor is a multiple of it: "
            "key-value heads are divided, or replicated evenly"
        ),
        legal=legal_tp,
    ),
    Rule(
        "tp divides the feed-forward",
        "parallel.tp",
        broken=lambda c: c.model.intermediate_size % c.parallel.tp,
        why=lambda c: f"does not divide model.intermediate_size = {c.model.intermediate_size}: each rank holds an equal part",
        legal=legal_tp,
    ),
    Rule(
        "sequence_parallel needs tp",
        "parallel.sequence_parallel",
        broken=lambda c: c.parallel.sequence_parallel and c.parallel.tp == 1,
        why="needs parallel.tp > 1: with one rank there is nothing to split",
        legal="Set it to false, or parallel.tp to 2 or more.",
    ),
    Rule(
        "sequence_parallel divides the sequence",
        "data.sequence_length",
        broken=lambda c: c.parallel.sequence_parallel and c.data.sequence_length % c.parallel.tp,
        why=lambda c: f"is not a multiple of parallel.tp = {c.parallel.tp}, as parallel.sequence_parallel needs",
        legal=lambda c: around(c.data.sequence_length, c.parallel.tp),
    ),
    Rule(
        "cp is one",
        "parallel.cp",
        broken=lambda c: c.parallel.cp != 1,
        why="is not supported yet: ring attention is planned",
        legal="Legal value: 1. To spread a long sequence, use parallel.tp with parallel.sequence_parallel.",
    ),
    Rule(
        "pp within layers",
        "parallel.pp",
        broken=lambda c: c.parallel.pp > c.model.num_hidden_layers,
        why=lambda c: f"exceeds model.num_hidden_layers = {c.model.num_hidden_layers}: each stage holds at least one layer",
        legal=lambda c: range(1, c.model.num_hidden_layers + 1),
    ),
    Rule(
        "partition has a number for each stage",
        "parallel.partition",
        broken=lambda c: c.parallel.partition is not None and len(c.parallel.partition) != c.parallel.pp,
        why=lambda c: f"has {len(c.parallel.partition or [])} entries for parallel.pp = {c.parallel.pp} stages",
        legal=_example_partition,
    ),
    Rule(
        "partition leaves no stage empty",
        "parallel.partition",
        broken=lambda c: c.parallel.partition is not None and min(c.parallel.partition) < 1,
        why="leaves a stage without a layer",
        legal=_example_partition,
    ),
    Rule(
        "partition holds every layer",
        "parallel.partition",
        broken=lambda c: c.parallel.partition is not None and sum(c.parallel.partition) != c.model.num_hidden_layers,
        why=lambda c: f"holds {sum(c.parallel.partition or [])} layers, but model.num_hidden_layers = {c.model.num_hidden_layers}",
        legal=_example_partition,
    ),
    Rule(
        "the mesh fills the world",
        "parallel.dp",
        broken=lambda c: c.parallel.dp is None or _model_ranks(c) * c.parallel.dp != c.world_size,
        why=lambda c: f"does not fill the run's {c.world_size} process{'es' if c.world_size > 1 else ''} with {_mesh(c)}",
        legal=_legal_dp,
    ),
    Rule(
        "zero stage",
        "parallel.zero",
        broken=lambda c: c.parallel.zero not in (0, 1),
        why=lambda c: "is not supported yet: ZeRO-2 and ZeRO-3 are planned" if c.parallel.zero in (2, 3) else "is not a ZeRO stage",
        legal=[0, 1],
    ),
    # data
    Rule(
        "training data is given",
        "data.train",
        broken=lambda c: not prefixes(c.data.train),
        why="names no token file",
        legal="Give the PREFIX of PREFIX.bin and PREFIX.idx; tools/prepare_data.py --output PREFIX makes them.",
    ),
    *_token_file_rules("data.train"),
    *_token_file_rules("data.validation"),
    Rule(
        "held-out share",
        "data.validation",
        broken=lambda c: isinstance(c.data.validation, float) and not 0 < c.data.validation < 1,
        why="is not a fraction of the training data",
        legal="Legal values: above 0 and below 1, for example 0.05; or the PREFIX of another token file.",
    ),
    Rule(
        "one vocabulary",
        "data.train",
        broken=lambda c: len({token_file(prefix).vocab_size for prefix in _all_prefixes(c)} - {None}) > 1,
        why=lambda c: (
            "and data.validation mix vocabularies: "
            + ", ".join(f"{prefix} has {token_file(prefix).vocab_size} tokens" for prefix in _all_prefixes(c))
        ),
        legal="Prepare all of them with one tokenizer.",
    ),
    Rule(
        "vocabulary is known",
        "model.vocab_size",
        broken=lambda c: c.model.vocab_size is None,
        why=lambda c: f"can not be taken from the data: {prefixes(c.data.train)[0]}.json does not say it",
        legal="Give model.vocab_size, the number of tokens of the tokenizer that made the data.",
    ),
    Rule(
        "vocabulary holds the data",
        "model.vocab_size",
        broken=lambda c: (c.model.vocab_size or 0) < (data_vocab_size(c) or 0),
        why=lambda c: f"is less than the {data_vocab_size(c)} tokens of data.train",
        legal=lambda c: f"Legal values: {data_vocab_size(c)} and above. Nearest: {data_vocab_size(c)}.",
    ),
    _end_of_document_rule("data.reset_positions"),
    _end_of_document_rule("data.eod_mask_loss"),
    Rule(
        "sequence within the model's positions",
        "data.sequence_length",
        broken=lambda c: c.data.sequence_length > c.model.max_position_embeddings,
        why=lambda c: f"exceeds model.max_position_embeddings = {c.model.max_position_embeddings}",
        legal=lambda c: f"Legal values: up to {c.model.max_position_embeddings}; or raise model.max_position_embeddings.",
    ),
    # train and optimizer
    Rule(
        "whole microbatches",
        "train.global_batch_size",
        broken=lambda c: c.train.global_batch_size % (c.train.micro_batch_size * (c.parallel.dp or 1)),
        why=lambda c: f"is not a multiple of train.micro_batch_size * parallel.dp = {c.train.micro_batch_size} * {c.parallel.dp}",
        legal=lambda c: around(c.train.global_batch_size, c.train.micro_batch_size * (c.parallel.dp or 1)),
    ),
    Rule(
        "fp64 on CPU",
        "train.precision",
        broken=lambda c: c.train.precision == "fp64" and c.local_devices,
        why=lambda c: f"is for proof on CPU, and this run would use {c.local_devices} GPUs",
        legal="Set it to fp32 or bf16, or hide the GPUs with CUDA_VISIBLE_DEVICES= (empty).",
    ),
    Rule(
        "recompute mode",
        "train.recompute",
        broken=lambda c: not re.fullmatch(r"none|selective|full|every-[1-9]\d*", c.train.recompute),
        why="is not a recomputation mode",
        legal=["none", "selective", "full", "every-2"],
    ),
    Rule(
        "stop_after is a duration",
        "train.stop_after",
        broken=lambda c: c.train.stop_after is not None and not duration_seconds(c.train.stop_after),
        why="is not a duration",
        legal="Write hours, minutes and seconds in this order: 3h50m, 90m or 30s.",
    ),
    Rule(
        "warm-up within the run",
        "optimizer.warmup_steps",
        broken=lambda c: c.optimizer.warmup_steps > c.train.steps,
        why=lambda c: f"exceeds train.steps = {c.train.steps}",
        legal=lambda c: f"Legal values: 0 to {c.train.steps}. Nearest: {c.train.steps}.",
    ),
    Rule(
        "warm-up before the decay",
        "optimizer.wsd_decay_fraction",
        broken=lambda c: (
            c.optimizer.decay == "wsd" and c.optimizer.warmup_steps + c.optimizer.wsd_decay_fraction * c.train.steps > c.train.steps
        ),
        why=lambda c: (
            f"of train.steps = {c.train.steps} starts the decay before optimizer.warmup_steps = {c.optimizer.warmup_steps} are done"
        ),
        legal=lambda c: f"Legal values: up to {1 - c.optimizer.warmup_steps / c.train.steps:.4g}; or shorten the warm-up.",
    ),
    Rule(
        "min_lr below lr",
        "optimizer.min_lr",
        broken=lambda c: c.optimizer.min_lr > c.optimizer.lr,
        why=lambda c: f"exceeds optimizer.lr = {c.optimizer.lr}",
        legal=lambda c: f"Legal values: 0 to {c.optimizer.lr}. Nearest: {c.optimizer.lr}.",
    ),
    Rule(
        "two betas",
        "optimizer.betas",
        broken=lambda c: len(c.optimizer.betas) != 2,
        why="is not a pair",
        legal="Give two numbers, for example [0.9, 0.95].",
    ),
    Rule(
        "lr_scaling has its base",
        "optimizer.lr_scaling",
        broken=lambda c: c.optimizer.lr_scaling != "none" and c.optimizer.base_batch_size is None,
        why="needs optimizer.base_batch_size, the batch size at which optimizer.lr was chosen",
        legal="Give it, or set optimizer.lr_scaling to none.",
    ),
    # checkpoint and validation
    Rule(
        "checkpoint exists",
        "checkpoint.load",
        broken=lambda c: c.checkpoint.load not in ("auto", "none") and not is_checkpoint(c.checkpoint.load),
        why="is neither auto nor none nor a checkpoint directory: it has no state.json",
        legal="Give a checkpoint directory, for example runs/NAME/checkpoints/step_00000100.",
    ),
    Rule(
        "resume or warm start",
        "model.init_from",
        broken=lambda c: c.model.init_from and c.checkpoint.load not in ("auto", "none"),
        why=lambda c: f"starts at step 0, but checkpoint.load = {c.checkpoint.load} resumes a run",
        legal="Remove one of the two.",
    ),
    Rule(
        "validation has data",
        "validation.interval",
        broken=lambda c: c.validation.interval is not None and c.data.validation is None,
        why="needs data.validation",
        legal="Give a token file PREFIX or a held-out fraction such as 0.05, or set validation.interval to null.",
    ),
)
"""All rules; each name is unique."""

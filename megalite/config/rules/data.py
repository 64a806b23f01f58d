"""Rules for token files: they exist, share one vocabulary, and fit the options that use them."""

import math
import os
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any

from megalite.config.rule import Rule, RuleContext, is_checkpoint
from megalite.config.schema import Config
from megalite.config.token_files import data_vocab_size, is_chat, metadata, named_sets, prefixes


def _all_prefixes(c: Config) -> list[str]:
    return prefixes(c.data.train) + prefixes(c.data.validation)


def _missing(source: Any) -> list[str]:
    """The files that are not there; os.path, unlike pathlib, takes a name that is too long for one of
    these."""
    return [
        f"{p}{end}" for p in prefixes(source) for end in (".bin", ".idx") if not os.path.isfile(f"{p}{end}")
    ]


def _nearest_prefix(source: Any) -> str:
    prefix = Path(_missing(source)[0]).with_suffix("")
    others = sorted(str(path.with_suffix("")) for path in prefix.parent.glob("*.bin"))
    if near := get_close_matches(str(prefix), others, n=1):
        return f"Nearest: {near[0]}."
    if os.path.isfile(prefix):
        return (
            f"Make them of the text in it with megalite prepare --input {prefix} --output "
            f"{prefix.with_suffix('')}."
        )
    return f"Make it with megalite prepare --output {prefix}."


def _vocabularies(c: Config) -> str:
    return ", ".join(
        f"{prefix} has {metadata(prefix).get('vocab_size')} tokens"
        for prefix in dict.fromkeys(_all_prefixes(c))
    )


def _token_file_rules(option: str) -> tuple[Rule, Rule, Rule]:
    get = attrgetter(option)

    def in_brackets(c: RuleContext) -> bool:
        return isinstance(get(c), str) and get(c).startswith(("{", "[")) and bool(_missing(get(c)))

    def bad_weight(c: RuleContext) -> bool:
        blend = isinstance(get(c), dict) and not named_sets(get(c))
        return blend and not all(math.isfinite(weight) and weight > 0 for weight in get(c).values())

    return (
        Rule(
            f"{option} is one text",
            option,
            in_brackets,
            message="is a text, and neither a list nor a mapping of token files",
            legal="Write [PREFIX, PREFIX], {PREFIX: weight} or for validation {NAME: PREFIX}, with a space "
            "after each colon.",
        ),
        Rule(
            f"{option} weights are positive",
            option,
            bad_weight,
            message="has a weight that is not a positive number",
            legal="Give every prefix a weight above 0, or remove it.",
        ),
        Rule(
            f"{option} exists",
            option,
            lambda c: _missing(get(c)),
            message=lambda c: f"does not exist: there is no {' and no '.join(_missing(get(c)))}",
            legal=lambda c: _nearest_prefix(get(c)),
        ),
    )


def _end_of_document_rule(option: str) -> Rule:
    def without(c: RuleContext) -> list[str]:
        return [
            prefix for prefix in _all_prefixes(c) if metadata(prefix).get("eos") is None or is_chat(prefix)
        ]

    return Rule(
        f"{option} needs an end-of-document token",
        option,
        lambda c: attrgetter(option)(c) and without(c),
        message=lambda c: (
            f"needs text whose documents end in an EOS token, and {without(c)[0]}.json names none, or says "
            "chat"
        ),
        legal='Set it to false, which is right for chat data, or write {"vocab_size": V, "eos": ID} into '
        "that file.",
    )


def _longer(c: RuleContext) -> str:
    """The presets of the same shape that have positions for the sequence."""
    from megalite.families.presets import presets

    found = [
        name
        for name, shape in presets().items()
        if all(
            shape[field] == getattr(c.model, field)
            for field in ("hidden_size", "num_hidden_layers", "intermediate_size")
        )
        and shape["max_position_embeddings"] >= c.data.sequence_length
    ]
    return f", or take the preset {' or '.join(found)}" if found else ""


def _random_on_chat_data(c: RuleContext) -> bool:
    """Whether a run on conversations has the shape of a model and not its weights. A run that resumes has its
    own."""
    resumes = c.checkpoint.load not in ("auto", "none") or (
        c.checkpoint.load == "auto" and is_checkpoint(str(Path(c.run.dir, c.run.name)))
    )
    return (
        c.model.from_hf is not None
        and c.model.init_from is None
        and not resumes
        and any(map(is_chat, _all_prefixes(c)))
    )


def _share(c: RuleContext) -> str:
    """The way out for a number that is no fraction: of what was likely meant as a percentage, that one."""
    value = c.data.validation
    listed = "Legal values: above 0 and below 1, for example 0.05; or the PREFIX of another token file"
    if value == 0:
        return f"{listed}. Nearest: null, for no validation."
    return (
        f"{listed}. Nearest: {value / 100:g}."
        if isinstance(value, float) and 1 <= value < 100
        else f"{listed}."
    )


def _way_to_one_vocabulary(c: RuleContext) -> str:
    """What brings a model's vocabulary and that of its data together: the user added tokens, or took another
    tokenizer."""
    needed, start = data_vocab_size(c), c.model.initial_weights
    source = c.model.from_hf or (
        start.removeprefix("hf:") if start is not None and start.startswith("hf:") else None
    )
    if start is None and source is None:
        return f"Legal values: {needed} and above. Nearest: {needed}."
    if c.model.resize_embeddings is not None:
        return "Leave it out: model.resize_embeddings gives the model the vocabulary of the data."
    with_weights = (
        ""
        if start is not None
        else f" and model.init_from = hf:{source} (for random weights, model.vocab_size = {needed})"
    )
    own = f"--tokenizer {source}" if source is not None else "the tokenizer of the model's own data"
    return (
        f"If tokens were added to the model's tokenizer, set model.resize_embeddings = mean{with_weights}; "
        "if it is another tokenizer, "
        f"prepare the data again with {own}."
    )


def _untrained_tables(c: RuleContext) -> list[str]:
    """The tables of the vocabulary that adapters leave frozen."""
    return [name for name in c.model.vocabulary_tables if name not in (c.lora.modules_to_save or ())]


RULES: tuple[Rule, ...] = (
    Rule(
        "training data is given",
        "data.train",
        lambda c: not prefixes(c.data.train),
        message="names no token file",
        legal="Give the PREFIX of PREFIX.bin and PREFIX.idx; megalite prepare --output PREFIX makes them.",
    ),
    *_token_file_rules("data.train"),
    *_token_file_rules("data.validation"),
    Rule(
        "validation data is named",
        "data.validation",
        lambda c: isinstance(c.data.validation, (list, dict)) and not c.data.validation,
        message="names no token file",
        legal="Give a token file PREFIX, several as {NAME: PREFIX}, a held-out fraction such as 0.05, or "
        "null for no validation.",
    ),
    Rule(
        "a validation set has a name",
        "data.validation",
        lambda c: isinstance(c.data.validation, dict) and "" in c.data.validation,
        message="has a set without a name, by which its loss is written",
        legal="Write {NAME: PREFIX}, with a name before each colon.",
    ),
    Rule(
        "held-out share",
        "data.validation",
        lambda c: isinstance(c.data.validation, float) and not 0 < c.data.validation < 1,
        message="is not a fraction of the training data",
        legal=_share,
    ),
    Rule(
        "one vocabulary",
        "data.train",
        lambda c: len({metadata(p).get("vocab_size") for p in _all_prefixes(c)} - {None}) > 1,
        message=lambda c: f"and data.validation mix vocabularies: {_vocabularies(c)}",
        legal="Prepare all of them with one tokenizer.",
    ),
    Rule(
        "vocabulary is known",
        "model.vocab_size",
        lambda c: c.model.vocab_size is None,
        message=lambda c: (
            f"can not be taken from the data: {prefixes(c.data.train)[0]}.json does not have it"
        ),
        legal="Give model.vocab_size, the number of tokens of the tokenizer that made the data.",
    ),
    Rule(
        "vocabulary holds the data",
        "model.vocab_size",
        lambda c: (c.model.vocab_size or 0) < (data_vocab_size(c) or 0),
        message=lambda c: f"is less than the {data_vocab_size(c)} tokens of the tokenizer of data.train",
        legal=_way_to_one_vocabulary,
    ),
    Rule(
        "rows are added to weights",
        "model.resize_embeddings",
        lambda c: c.model.resize_embeddings is not None and c.model.initial_weights is None,
        message="adds rows to the embedding of the weights that model.init_from names, and there are none",
        legal="Set model.init_from, or leave it out: random weights have the vocabulary of the data.",
    ),
    Rule(
        "new rows are trained",
        "lora.modules_to_save",
        lambda c: c.lora.rank and c.model.resize_embeddings is not None and _untrained_tables(c),
        message=lambda c: (
            f"leaves out {' and '.join(_untrained_tables(c))}: rows that model.resize_embeddings adds would "
            "stay as they start"
        ),
        legal="Name embedding, and head unless it is tied; or leave the option out, which names them.",
    ),
    Rule(
        "chat or text",
        "data.train",
        lambda c: len({is_chat(p) for p in _all_prefixes(c)}) > 1,
        message=lambda c: (
            f"and data.validation mix conversations ({', '.join(filter(is_chat, _all_prefixes(c)))}) with "
            "text"
        ),
        legal="Give token files of one kind; megalite prepare --chat makes those of conversations.",
    ),
    Rule(
        "fine-tuning starts from weights",
        "model.init_from",
        _random_on_chat_data,
        message="would train random weights on conversations: {model.from_hf} gives the shape alone",
        legal=lambda c: (
            f"Set it to hf:{c.model.from_hf} for the weights of that model, or to none for random weights on "
            "purpose."
        ),
    ),
    Rule(
        "packing of conversations",
        "data.packing",
        lambda c: c.data.packing and not any(map(is_chat, _all_prefixes(c))),
        message="has no effect: data.train is text, which fills every row",
        legal="Set it to false, or prepare conversations with megalite prepare --chat.",
    ),
    _end_of_document_rule("data.reset_positions"),
    _end_of_document_rule("data.eod_mask_loss"),
    Rule(
        "rows have the tokens that modules predict",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers >= c.data.sequence_length,
        message="does not leave a target in a row of {data.sequence_length}",
        legal=lambda c: (
            f"Legal values: up to {c.data.sequence_length - 1}. Nearest: {c.data.sequence_length - 1}."
        ),
    ),
    Rule(
        "sequence within the model's positions",
        "data.sequence_length",
        lambda c: c.data.sequence_length > c.model.max_position_embeddings,
        message="exceeds {model.max_position_embeddings}",
        legal=lambda c: (
            f"Legal values: up to {c.model.max_position_embeddings}. Nearest: "
            f"{c.model.max_position_embeddings}. "
            f"Or raise model.max_position_embeddings{_longer(c)}."
        ),
    ),
)

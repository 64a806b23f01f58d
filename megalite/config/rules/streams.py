"""Rules of streams and of fill-in-the-middle."""

from operator import attrgetter
from typing import Any

from megalite.config.extensions import is_source
from megalite.config.rule import Rule
from megalite.config.rules.context import RuleContext
from megalite.config.streams import FORMATS, has_streams, is_stream, names_in, streams_in
from megalite.config.token_files import is_chat


def _streams(c: RuleContext) -> list[str]:
    return streams_in(c.data.train) + streams_in(c.data.validation)


def _only_for_streams(option: str, unset: Any) -> Rule:
    return Rule(
        f"{option} is of streams",
        option,
        lambda c: attrgetter(option)(c) != unset and not _streams(c),
        message="has no effect, because data.train and data.validation have no stream",
        legal=f"Remove it, or name a stream as FORMAT:PATH, where FORMAT is {', '.join(FORMATS)}.",
    )


def _only_for_fim(option: str, unset: Any) -> Rule:
    return Rule(
        f"{option} is of fill-in-the-middle",
        option,
        lambda c: attrgetter(option)(c) != unset and not c.data.fim_rate,
        message="has no effect, because data.fim_rate is 0",
        legal="Set data.fim_rate, or remove it.",
    )


def _without_fim(c: RuleContext) -> list[str]:
    """The training data that is not rewritten for fill-in-the-middle."""
    return [n for n in names_in(c.data.train) if is_source(n) or (not is_stream(n) and is_chat(n))]


RULES: tuple[Rule, ...] = (
    Rule(
        "streams have a tokenizer",
        "data.tokenizer",
        lambda c: c.data.tokenizer is None and _streams(c),
        message=lambda c: f"is not set, and {_streams(c)[0]} is tokenized while the run trains",
        legal="Set it to byte, a sentencepiece model, a tokenizer.json or a Hugging Face directory.",
    ),
    _only_for_streams("data.tokenizer", None),
    _only_for_streams("data.text_key", "text"),
    _only_for_streams("data.bad_records", "error"),
    Rule(
        "lanes are of streams",
        "data.lanes",
        lambda c: c.data.lanes is not None and not has_streams(c.data),
        message="has no effect, because token files are read at random",
        legal="Remove it.",
    ),
    Rule(
        "the buffer is of shuffled streams",
        "data.shuffle_buffer",
        lambda c: c.data.shuffle_buffer != 256 and not (has_streams(c.data) and c.data.shuffle),
        message="has no effect, because no stream is shuffled",
        legal="Remove it.",
    ),
    Rule(
        "a list is of streams or of token files",
        "data.train",
        lambda c: isinstance(c.data.train, list) and 0 < len(streams_in(c.data.train)) < len(c.data.train),
        message="is a list of streams and token files, which cannot be joined end to end",
        legal="Write {NAME: weight, …}, a blend of them.",
    ),
    Rule(
        "a stream has no held-out part",
        "data.validation",
        lambda c: isinstance(c.data.validation, float) and streams_in(c.data.train),
        message="is a fraction of a stream, whose length is not known",
        legal="Name other data, or null for no validation.",
    ),
    Rule(
        "validation on a stream ends",
        "validation.batches",
        lambda c: c.validation.batches is None and streams_in(c.data.validation),
        message=lambda c: f"is null, and {streams_in(c.data.validation)[0]} has no end",
        legal="Set it to a number of batches.",
    ),
    Rule(
        "epochs are counted",
        "train.epochs",
        lambda c: c.train.epochs is not None and (c.data.fim_rate or streams_in(c.data.train)),
        message="cannot be counted, because the number of tokens of a stream, or after data.fim_rate, is not "
        "known",
        legal="Set train.tokens or train.steps.",
    ),
    Rule(
        "fill-in-the-middle rewrites text",
        "data.fim_rate",
        lambda c: c.data.fim_rate and _without_fim(c),
        message=lambda c: f"is set, and {_without_fim(c)[0]} has no documents of text",
        legal="Set it to 0, or train on token files of text or on streams.",
    ),
    _only_for_fim("data.fim_spm_rate", 0.5),
    _only_for_fim("data.fim_tokens", None),
    Rule(
        "three tokens of fill-in-the-middle",
        "data.fim_tokens",
        lambda c: c.data.fim_tokens is not None and len({*c.data.fim_tokens}) != 3,
        message="are not three tokens",
        legal="Write [PREFIX, SUFFIX, MIDDLE], such as [<fim_prefix>, <fim_suffix>, <fim_middle>].",
    ),
)

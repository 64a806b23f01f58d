"""Training and validation data."""

import math
import os
from dataclasses import dataclass
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megalite.config import amounts
from megalite.config.extensions import EXTENSIONS, is_own_objective, is_source
from megalite.config.option import PROBABILITY, SIZE, option
from megalite.config.rule import Rule, suggestion
from megalite.config.streams import names_in, streams_in
from megalite.config.token_files import is_chat, located, metadata, missing_files, named_sets, prefixes
from megalite.stores.url import is_url

if TYPE_CHECKING:
    from megalite.config.rules.context import RuleContext


@dataclass
class DataConfig:
    train: str | list[str] | dict[str, float] | None = option(None, path=True)
    """Training data: a token file's PREFIX (of PREFIX.bin and PREFIX.idx), a list of prefixes, {PREFIX:
    weight} for a blend, or NAME:ARGUMENT for a data source of run.extensions. A PREFIX may be the URL of an
    object store. A stream stands for a PREFIX: jsonl:PATH, parquet:PATH, webdataset:PATH or mds:DIRECTORY,
    tokenized while the run trains."""
    validation: float | str | list[str] | dict[str, float] | dict[str, str] | None = option(
        None, amount=amounts.PERCENTAGE, path=True
    )
    """Validation data: the same; or several sets, {NAME: prefix}, each with a loss of its own; or the
    fraction of the training data that is held out at its end, 0.05 or 5%. null: no validation."""
    shuffle: bool = True
    """Shuffle the training samples. The order depends on (seed, epoch, dataset) only."""
    sequence_length: int = option(256, SIZE)
    """Length of one sample, in tokens."""
    packing: bool = False
    """For chat data: fill each sample with as many whole conversations as fit, which do not attend to each
    other. false: one, padded."""
    reset_positions: bool = False
    """Treat EOS as the end of a document: positions restart after it, and attention does not cross it."""
    eod_mask_loss: bool = False
    """Exclude from the loss the prediction made from an EOS token, which is the first token of the next
    document."""
    tokenizer: str | None = option(None, path=True)
    """Tokenizer of streams: byte, a sentencepiece model, or a Hugging Face directory."""
    text_key: str = "text"
    """Key or column with the text in the records of streams; for WebDataset also the ending of the members
    with the text."""
    bad_records: Literal["error", "skip"] = "error"
    """What a record of a stream without text, or a damaged one, is: an error, or skipped and reported."""
    lanes: int | None = option(None, SIZE)
    """Number of independent sequences of rows into which the shards of streams are divided; a multiple of dp
    · train.micro_batch_size, so that no document is tokenized on two ranks. null: the largest power of two up
    to 64 and to the number of shards. It cannot change while a run lasts."""
    shuffle_buffer: int = option(256, SIZE)
    """Number of documents of each lane that are shuffled together, in addition to the order of the shards."""
    fim_rate: float = option(0.0, PROBABILITY)
    """Fraction of the training documents that are rewritten for fill-in-the-middle, before they are
    packed."""
    fim_spm_rate: float = option(0.5, PROBABILITY)
    """Fraction of these documents in which the suffix comes before the prefix (SPM); in the others it comes
    after it (PSM)."""
    fim_tokens: list[str] | None = None
    """The tokenizer's tokens before prefix, suffix and middle. null: those of StarCoder, DeepSeek-Coder,
    Qwen2.5-Coder or CodeLlama, whichever it has."""
    allow_tokenizer_change: bool = False
    """Accept data made with another tokenizer than other data, the starting weights or the checkpoint that
    the run resumes."""


def _unregistered(source: Any) -> str:
    """The way out for NAME:ARGUMENT, which may be meant as a data source; empty for other names."""
    name, colon, _ = source.partition(":") if isinstance(source, str) else ("", "", "")
    if not colon or "/" in name or name == "hf":
        return ""
    names = ", ".join(EXTENSIONS.sources) or "none"
    return (
        f"A data source of your own is registered by a file in run.extensions (registered: {names})."
        f"{suggestion(name, EXTENSIONS.sources)}"
    )


def _nearest_prefix(source: Any) -> str:
    first = missing_files(source)[0]
    if is_url(first):
        return "Check the URL of PREFIX, without its .bin, with the tools of the store."
    prefix = Path(first).with_suffix("")
    others = sorted(str(path.with_suffix("")) for path in prefix.parent.glob("*.bin"))
    if near := get_close_matches(str(prefix), others, n=1):
        return f"Nearest: {near[0]}."
    if unregistered := _unregistered(source):
        return unregistered
    if os.path.isfile(prefix):
        return (
            f"Make them of the text in it with megalite prepare --input {prefix} --output "
            f"{prefix.with_suffix('')}."
        )
    return f"Make it with megalite prepare --output {prefix}."


def _token_file_rules(option: str) -> tuple[Rule, Rule, Rule]:
    get = attrgetter(option)

    def in_brackets(c: "RuleContext") -> bool:
        return isinstance(get(c), str) and get(c).startswith(("{", "[")) and bool(missing_files(get(c)))

    def bad_weight(c: "RuleContext") -> bool:
        blend = isinstance(get(c), dict) and not named_sets(get(c))
        return blend and not all(math.isfinite(weight) and weight > 0 for weight in get(c).values())

    return (
        Rule(
            f"{option} is one text",
            option,
            in_brackets,
            message="is a string, not a list or a mapping of token files",
            legal="Write [PREFIX, PREFIX], {PREFIX: weight} or for validation {NAME: PREFIX}, with a space "
            "after each colon.",
        ),
        Rule(
            f"{option} weights are positive",
            option,
            bad_weight,
            message="has a weight that is not a positive number",
            legal="Set the weight of every prefix to a positive number, or remove the prefix.",
        ),
        Rule(
            f"{option} exists",
            option,
            lambda c: missing_files(get(c)),
            message=lambda c: f"does not exist: could not find {' and '.join(missing_files(get(c)))}",
            legal=lambda c: _nearest_prefix(get(c)),
        ),
    )


def _share(c: "RuleContext") -> str:
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


def all_prefixes(c: "RuleContext") -> list[str]:
    return prefixes(c.data.train) + prefixes(c.data.validation)


def present_prefixes(c: "RuleContext") -> list[str]:
    """The token files of which something is known on this machine. A dry run needs none of them."""
    return [
        prefix
        for prefix in all_prefixes(c)
        if any(os.path.isfile(f"{located(prefix)}{end}") for end in (".json", ".idx", ".bin"))
    ]


def text_sources(c: "RuleContext") -> list[str]:
    """The data sources of the user and the streams, whose rows are text."""
    return own_sources(c) + streams_in(c.data.train) + streams_in(c.data.validation)


def own_sources(c: "RuleContext") -> list[str]:
    """The data sources of the user, whose rows are text."""
    return [str(source) for source in (c.data.train, c.data.validation) if is_source(source)]


def _is_text(c: "RuleContext") -> bool:
    """Whether what is known of the data is text alone."""
    return bool(text_sources(c) or present_prefixes(c)) and not any(map(is_chat, all_prefixes(c)))


def _vocabularies(c: "RuleContext") -> str:
    return ", ".join(
        f"{prefix} has {metadata(prefix).get('vocab_size')} tokens"
        for prefix in dict.fromkeys(all_prefixes(c))
    )


def _end_of_document_rule(option: str) -> Rule:
    def without(c: "RuleContext") -> list[str]:
        return own_sources(c) + [
            prefix for prefix in all_prefixes(c) if metadata(prefix).get("eos") is None or is_chat(prefix)
        ]

    return Rule(
        f"{option} needs an end-of-document token",
        option,
        lambda c: attrgetter(option)(c) and without(c),
        message=lambda c: (
            f"requires text whose documents end in an EOS token, and {without(c)[0]}.json names none, or "
            "says "
            "chat"
        ),
        legal='Set it to false, which is correct for chat data, or write {"vocab_size": V, "eos": ID} into '
        "that file.",
    )


def _wants_preferences(c: "RuleContext") -> bool:
    """Whether text is no data of the objective at all, which a rule of objectives says."""
    name = c.train.objective
    return name not in ("cross_entropy", "distillation") and not is_own_objective(name)


RULES: tuple[Rule, ...] = (
    Rule(
        "training data is given",
        "data.train",
        lambda c: not names_in(c.data.train),
        message="is not set",
        legal="Use the PREFIX of PREFIX.bin and PREFIX.idx, which megalite prepare --output PREFIX creates.",
    ),
    *_token_file_rules("data.train"),
    *_token_file_rules("data.validation"),
    Rule(
        "validation data is named",
        "data.validation",
        lambda c: isinstance(c.data.validation, (list, dict)) and not c.data.validation,
        message="is not set",
        legal="Use a token file PREFIX, several as {NAME: PREFIX}, a held-out fraction such as 0.05, "
        "or "
        "null for no validation.",
    ),
    Rule(
        "a validation set has a name",
        "data.validation",
        lambda c: isinstance(c.data.validation, dict) and "" in c.data.validation,
        message="has a set without a name, which is required to log its loss",
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
        lambda c: len({metadata(p).get("vocab_size") for p in all_prefixes(c)} - {None}) > 1,
        message=lambda c: f"and data.validation use different vocabularies: {_vocabularies(c)}",
        legal="Prepare all of them with the same tokenizer.",
    ),
    Rule(
        "chat or text",
        "data.train",
        lambda c: len({is_chat(p) for p in all_prefixes(c)} | {False for _ in text_sources(c)}) > 1,
        message=lambda c: (
            f"and data.validation mix conversations ({', '.join(filter(is_chat, all_prefixes(c)))}) with text"
        ),
        legal="Use token files of one kind; megalite prepare --chat creates those of conversations.",
    ),
    Rule(
        "packing of conversations",
        "data.packing",
        lambda c: c.data.packing and _is_text(c) and not _wants_preferences(c),
        message="has no effect, because data.train is text, which fills every row",
        legal="Set it to false, or prepare conversations with megalite prepare --chat.",
    ),
    _end_of_document_rule("data.reset_positions"),
    _end_of_document_rule("data.eod_mask_loss"),
)

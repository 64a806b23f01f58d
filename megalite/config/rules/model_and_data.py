"""Rules between the model and its data: vocabulary, initial weights and sequence length."""

from megalite.config.extensions import is_source
from megalite.config.rule import Rule, is_checkpoint
from megalite.config.rules.context import RuleContext
from megalite.config.sections.data import all_prefixes
from megalite.config.streams import has_streams
from megalite.config.token_files import data_vocab_size, is_chat, metadata, prefixes


def _first_data(c: RuleContext) -> str:
    """The file of the training data that says how many tokens there are, or the data source of the user."""
    files = prefixes(c.data.train)
    return f"{files[0]}.json" if files else str(c.data.train)


def _longer(c: RuleContext) -> str:
    """The presets of the same shape that have positions for the sequence."""
    from megalite.families.presets import presets

    longer = [
        name
        for name, shape in presets().items()
        if all(
            shape[field] == getattr(c.model, field)
            for field in ("hidden_size", "num_hidden_layers", "intermediate_size")
        )
        and shape["max_position_embeddings"] >= c.data.sequence_length
    ]
    return f", or take the preset {' or '.join(longer)}" if longer else ""


def _positions(c: RuleContext) -> int:
    """The number of positions that the model sees: those of the longest document if all documents begin at
    position 0, else those of a row.

    The padding of a row, and prompts with the completions of other examples, may have more than any document.
    Padding reads no weights but those of a learned position table.
    """
    row, files = c.data.sequence_length, all_prefixes(c)
    if row <= c.model.max_position_embeddings or c.model.position == "learned":
        return row
    if (
        is_source(c.data.train)
        or is_source(c.data.validation)
        or has_streams(c.data)
        or not all(_restarts(c, each) for each in files)
    ):
        return row
    from megalite.config.samples import DataError, TokenIndex, inputs_of, together  # numpy

    try:
        longest = [
            int((inputs_of(sizes, together(each)) if is_chat(each) else sizes).max())
            for each in files
            for sizes in (TokenIndex(each).sizes,)
        ]
    except DataError:  # not on this machine, or reported where the data is opened
        return row
    return min(row, max(longest, default=row))


def _restarts(c: RuleContext, prefix: str) -> bool:
    """Whether positions begin at 0 in each document of a token file, all of which end where the file says.

    Files of other programs may have documents without an EOS.
    """
    facts = metadata(prefix)
    if "chat" in facts:
        return facts.get("preference") != "labelled"
    return c.data.reset_positions and facts.get("eos") is not None and "preparation" in facts


def _random_on_chat_data(c: RuleContext) -> bool:
    """Whether a run on conversations has the shape of a model and not its weights. A run that resumes has its
    own."""
    resumes = c.checkpoint.names_checkpoint or (
        c.checkpoint.load == "auto" and is_checkpoint(str(c.run.directory))
    )
    return (
        c.model.from_hf is not None
        and c.model.init_from is None
        and not resumes
        and any(map(is_chat, all_prefixes(c)))
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
        return "Remove it: model.resize_embeddings uses the vocabulary of the data."
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
        "vocabulary is known",
        "model.vocab_size",
        lambda c: c.model.vocab_size is None,
        message=lambda c: f"cannot be read from the data, because {_first_data(c)} does not have it",
        legal="Set model.vocab_size to the vocabulary size of the tokenizer that prepared the data.",
    ),
    Rule(
        "vocabulary holds the data",
        "model.vocab_size",
        lambda c: (c.model.vocab_size or 0) < (data_vocab_size(c) or 0),
        message=lambda c: f"is smaller than the vocabulary of data.train ({data_vocab_size(c)} tokens)",
        legal=_way_to_one_vocabulary,
    ),
    Rule(
        "new rows are trained",
        "lora.modules_to_save",
        lambda c: c.lora.rank and c.model.resize_embeddings is not None and _untrained_tables(c),
        message=lambda c: (
            f"does not include {' and '.join(_untrained_tables(c))}, so rows added by "
            "model.resize_embeddings would "
            "not be trained"
        ),
        legal="Add embedding, and head unless it is tied; or remove the option to train both.",
    ),
    Rule(
        "fine-tuning starts from weights",
        "model.init_from",
        _random_on_chat_data,
        message="would train random weights on conversations, because {model.from_hf} only sets the shape",
        legal=lambda c: (
            f"Set it to hf:{c.model.from_hf} to load the weights of that model, or to none to train random "
            "weights on "
            "purpose."
        ),
    ),
    Rule(
        "rows have the tokens that modules predict",
        "model.mtp_layers",
        lambda c: c.model.mtp_layers >= c.data.sequence_length,
        message="leaves no target in a row of {data.sequence_length}",
        legal=lambda c: (
            f"Legal values: up to {c.data.sequence_length - 1}. Nearest: {c.data.sequence_length - 1}."
        ),
    ),
    Rule(
        "sequence within the model's positions",
        "data.sequence_length",
        lambda c: _positions(c) > c.model.max_position_embeddings,
        message=lambda c: (
            f"exceeds model.max_position_embeddings = {c.model.max_position_embeddings}"
            + (
                f", and the longest document has {longest} positions"
                if (longest := _positions(c)) < c.data.sequence_length
                else ""
            )
        ),
        legal=lambda c: (
            f"Legal values: up to {c.model.max_position_embeddings}. Nearest: "
            f"{c.model.max_position_embeddings}. "
            f"Or raise model.max_position_embeddings{_longer(c)}."
        ),
    ),
)

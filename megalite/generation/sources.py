"""Sources of models, a checkpoint of ours or a Hugging Face directory, with their tokenizer, chat template
and end tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import gcd
from pathlib import Path

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, find
from megalite.config.dims import ParallelDims
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.config.rules import LAYOUT_RULES, MODEL_RULES
from megalite.config.rules.context import RuleContext
from megalite.config.schema import Config
from megalite.config.sections.parallel import ParallelConfig
from megalite.config.token_files import metadata
from megalite.data.chat.template import ChatTemplate, read_template
from megalite.data.tokenizer import tokenizers as tokenizing
from megalite.data.tokenizer.comparison import Tokenized, compare
from megalite.data.tokenizer.identity import TokenizerIdentity, of_tokenizer
from megalite.data.tokenizer.run_copy import is_there
from megalite.data.tokenizer.tokenizers import Tokenizer
from megalite.families.model_config import end_ids
from megalite.huggingface.companions import recorded_tokenizer
from megalite.huggingface.convert import HF, HuggingFaceSource, origin, starting_weights
from megalite.parallel.spec import Rectangle

ALLOW = "--allow_tokenizer_change"
TIMEOUT = "24h"  # a conversation waits for its user; if a rank dies, the launcher ends the others


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded.

    Attributes:
        name: the checkpoint's directory, or hf:DIR.
        config: its training configuration; for a Hugging Face directory only the model.
        step: the step after which it was saved; 0 if that is not known.
        read: fills a rank's rectangles of the weights, reading only their bytes. Raises CheckpointError.
        companions: the Hugging Face directory with the tokenizer and generation settings that came with the
        weights, or None. tokenizer: the tokenizer that the weights were trained with, as far as it is known.
    """

    name: str
    config: Config
    step: int
    read: Callable[[Sequence[Rectangle]], None]
    companions: Path | None
    tokenizer: TokenizerIdentity

    @cached_property
    def trained_here(self) -> bool:
        """Whether the model was trained only on our training data, whose documents end with EOS and have no
        token at their beginning.

        A model fine-tuned from Hugging Face weights has learned how its tokenizer begins texts, and is
        prompted as its export would be.
        """
        return self.config.data.train is not None and not _began_elsewhere(self.config)


def open_source(name: Path | str, average: bool = False) -> ModelSource:
    """The model of a checkpoint, a run's directory (its newest checkpoint) or hf:DIR. Reads no weights.

    average: with the moving average of the weights (`train.ema_decay`) in their place. Raises CheckpointError
    or ConfigError.
    """
    if str(name).startswith(HF):
        if average:
            raise ConfigError(
                f"--ema: {name} is a Hugging Face model, which has no average of its weights. Leave out "
                "--ema."
            )
        directory = Path(str(name).removeprefix(HF))
        model = replace(HuggingFaceSource.of(directory).model, init_from=str(name))
        read = starting_weights(model)
        assert read is not None
        return ModelSource(str(name), Config(model=model), 0, read, directory, of_tokenizer(directory))
    directory = find(Path(name))
    manifest = checkpoint.manifest_of(directory)
    manifest = manifest.averaged() if average else manifest
    if "config" not in manifest.state:
        raise CheckpointError(
            f"{directory} holds no configuration. Give one that megalite train or megalite convert wrote."
        )
    config = from_dict(manifest.state["config"])
    read = partial(checkpoint.load, manifest, convert=True)
    step, companions = manifest.state.get("step", 0), origin(directory, config.model)
    return ModelSource(str(directory), config, step, read, companions, recorded_tokenizer(manifest))


def _began_elsewhere(config: Config) -> bool:
    """Whether a run's weights originate from a Hugging Face model, directly or through other runs whose
    checkpoints can still be read."""
    while (start := config.model.initial_weights) is not None:
        if start.startswith(HF):
            return True
        try:
            config = from_dict(checkpoint.manifest_of(find(Path(start))).state["config"])
        except (CheckpointError, ConfigError, KeyError):
            return False
        if config.data.train is None:  # imported
            return True
    return False


def for_inference(
    config: Config, *, tp: int = 1, pp: int = 1, cp: int = 1, precision: str = "fp32"
) -> Config:
    """The configuration of the same model for forward passes only, on its own layout, independent of the
    layout of training. Modules of multi-token prediction, which only training uses, are left out.

    cp ranks gather keys and values: the key-value cache needs them whole in any case.
    """
    train = replace(
        config.train,
        global_batch_size=1,
        micro_batch_size=1,
        recompute="none",
        compile=False,
        grad_dtype="fp32",
    )
    train.precision = precision  # type: ignore[assignment]
    saving = replace(config.checkpoint, async_save=False)
    ep = gcd(tp, config.model.num_experts or 1)  # experts too are split over tp ranks
    parallel = ParallelConfig(tp=tp, pp=pp, cp=cp, dp=1, context="gather", zero=0, ep=ep)
    model = replace(config.model, mtp_layers=0)
    return replace(
        config,
        run=replace(config.run, timeout=TIMEOUT),
        model=model,
        parallel=parallel,
        train=train,
        checkpoint=saving,
    )


def check_layout(config: Config) -> None:
    """Raise ConfigError if a model does not fit its layout."""
    facts = RuleContext(
        model=config.model, parallel=config.parallel, world_size=ParallelDims.of(config).world
    )
    for rule in (*MODEL_RULES, *LAYOUT_RULES):
        # every tp rank has the same rows, which is right without a backward
        if rule.option == "parallel.sequence_parallel":
            continue
        if rule.broken(facts):
            raise ConfigError(rule.describe(facts))


def tokenizer_of(
    source: ModelSource,
    name: str | None,
    *,
    allow_change: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> Tokenizer:
    """The tokenizer given by name, else that of the training data, else the one that came with the weights.
    The training data's is read from the run's copy where its own place does not hold it any more.

    allow_change: accept another tokenizer than the weights were trained with; `tell` is called with a line
    about it. Raises ConfigError if there is no tokenizer or it does not fit the model.
    """
    tokenizer = tokenizing.load(name) if name is not None else _own_tokenizer(source)
    vocabulary = source.config.model.vocabulary
    if tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, the model only {vocabulary}. "
            "Give the one that made its training data with --tokenizer."
        )
    if name is not None or source.tokenizer.can_be_known:
        tokenized = Tokenized(
            "its training data's tokenizer" if name is None else f"--tokenizer {name}",
            of_tokenizer(tokenizer.name),
            itself=True,
        )
        then = "" if is_there(source.tokenizer) else " as it was then"
        trained = f", {source.tokenizer.name}{then}," if source.tokenizer.name else ""
        way_out = f"Give the tokenizer that the model was trained with{trained} with --tokenizer"
        for line in compare(
            tokenized,
            Tokenized(source.name, source.tokenizer),
            allow=allow_change,
            way_out=way_out,
            option=ALLOW,
        ):
            tell(line)
    return tokenizer


def _training_data(source: ModelSource) -> str | None:
    """PREFIX of the token file that a model was trained on; the first one if there are several."""
    train = source.config.data.train
    return train if train is None or isinstance(train, str) else next(iter(train), None)


def _own_tokenizer(source: ModelSource) -> Tokenizer:
    if source.tokenizer.name is not None and is_there(source.tokenizer):  # at its place, or in the run
        return tokenizing.load(source.tokenizer.name)
    prefix = _training_data(source)
    if prefix is None and source.companions is None:
        raise ConfigError(
            "the checkpoint names no training data, so its tokenizer is unknown. Give it with --tokenizer."
        )
    try:
        return tokenizing.load_for(prefix) if prefix is not None else tokenizing.load(source.companions or "")
    except ConfigError as error:
        what = (
            "the training data's tokenizer" if prefix is not None else f"the tokenizer in {source.companions}"
        )
        raise ConfigError(f"{what} cannot be read: {error} Or give another with --tokenizer.") from None


def opening(source: ModelSource, tokenizer: Tokenizer) -> list[int]:
    """The tokens before a prompt: BOS if the tokenizer adds one and the model was trained on texts that begin
    with it."""
    return (
        [tokenizer.bos]
        if tokenizer.adds_bos and tokenizer.bos is not None and not source.trained_here
        else []
    )


def end_tokens(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that end a text: the tokenizer's EOS, and those in generation_config.json or else
    config.json."""
    return frozenset((tokenizer.eos, *([] if source.companions is None else end_ids(source.companions))))


def chat_template(source: ModelSource, tokenizer: Tokenizer, named: bool, file: Path | None) -> ChatTemplate:
    """The model's chat template: that of the file, else of its training data, else of its tokenizer, else our
    default.

    named: whether the tokenizer was given by name, whose own template then goes before that of the training
    data. Raises ConfigError if a file cannot be read, or if the template of the training data is gone.
    """
    prefix = None if named else _training_data(source)
    if file is not None:
        return ChatTemplate(tokenizer, read_template(file))
    template = ChatTemplate(
        tokenizer, None if prefix is None else metadata(prefix).get("chat", {}).get("template")
    )
    expected = None if named else source.tokenizer.template_hash
    if expected is not None and template.hash != expected:
        raise ConfigError(
            f"the chat template that {source.name} was trained with (hash {expected}) is not in "
            f"{prefix}.json any more. "
            "Give it with --chat_template."
        )
    return template

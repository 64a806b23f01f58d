"""Sources of models, a checkpoint of ours or a Hugging Face directory, with their tokenizer, chat template
and end tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite import checkpoint
from megalite.checkpoint import CheckpointError, find
from megalite.checkpoint.agreement import raise_on_all_ranks
from megalite.checkpoint.finite import nonfinite, reject
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
from megalite.huggingface.base_weights import BaseWeights, base_of, moved
from megalite.huggingface.companions import recorded_tokenizer
from megalite.huggingface.initial_weights import starting_weights
from megalite.huggingface.original import origin
from megalite.huggingface.source import HF, HuggingFaceSource
from megalite.launch.machine import local_world_size, usable_cores
from megalite.model.kinds import dispatch_of
from megalite.model.mtp.losses import without_further_losses
from megalite.parallel.quantized.reading import quantize_base
from megalite.parallel.spec import Rectangle

if TYPE_CHECKING:
    from megalite.assembly.parts import Parts
    from megalite.mesh.mesh import Mesh

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
            weights, or None.
        tokenizer: the tokenizer that the weights were trained with, as far as it is known.
        state: of a checkpoint; empty for a Hugging Face directory.
    """

    name: str
    config: Config
    step: int
    read: Callable[[Sequence[Rectangle]], None]
    companions: Path | None
    tokenizer: TokenizerIdentity
    state: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def trained_here(self) -> bool:
        """Return whether the model was trained only on our data.

        Documents in our data end with EOS and have no token at the start.

        A model fine-tuned from Hugging Face weights has learned how its tokenizer begins texts, and is
        prompted as its export would be.
        """
        return self.config.data.train is not None and not _began_elsewhere(self.config)

    def base(self) -> BaseWeights | None:
        """Return the base of adapters if it is quantized, and in no checkpoint.

        Raises CheckpointError if it is no longer where it was.
        """
        return (
            None if self.config.lora.base == "none" else base_of(self.config, self.state, Path(self.name))[1]
        )

    def read_base(self, parts: Parts) -> None:
        """Fill the quantized matrices of a rank, if it has any. Raises CheckpointError."""
        if (base := self.base()) is not None:
            quantize_base(parts.store, base, usable_cores() // local_world_size() or 1)


def open_source(name: Path | str, average: bool = False, base: str | None = None) -> ModelSource:
    """Open a checkpoint, a run directory (its newest checkpoint) or hf:DIR without reading weights.

    Args:
        average: with the moving average of the weights (`train.ema_decay`) in their place.
        base: where the quantized base of its adapters is, hf:DIR or a checkpoint; None: where the run read
            it.

    Raises:
        CheckpointError, ConfigError: it cannot be opened.
    """
    if str(name).startswith(HF):
        if average:
            raise ConfigError(
                f"--ema is not supported for Hugging Face models ({name}), which have no moving average. "
                "Remove --ema."
            )
        if base is not None:
            raise ConfigError(
                f"--base {base} has no effect: {name} is a Hugging Face model, which contains all of its "
                "weights. Remove --base."
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
            f"{directory} contains no configuration. Use a checkpoint written by megalite train or "
            "megalite convert."
        )
    manifest = moved(manifest, base)
    config = from_dict(manifest.state["config"])
    read = partial(checkpoint.load, manifest, convert=True)
    step, companions = manifest.state.get("step", 0), origin(directory, config.model)
    tokenizer = recorded_tokenizer(manifest)
    return ModelSource(str(directory), config, step, read, companions, tokenizer, manifest.state)


def load_into(parts: Parts, source: ModelSource, mesh: Mesh) -> None:
    """Load the weights of a model into parts that were built for it. Collective.

    Raises:
        CheckpointError: on every rank, if they cannot be read or are not finite.
    """
    with raise_on_all_ranks(mesh, CheckpointError):
        rectangles = parts.to_load()
        source.read(rectangles)
        if not source.name.startswith(HF):  # those tensors are checked when they are read
            reject(source.name, {part.name: nonfinite(part.tensor) for part in rectangles})
        source.read_base(parts)
    parts.store.publish()


def _began_elsewhere(config: Config) -> bool:
    """Return whether the weights of a run originate from a Hugging Face model.

    Follows runs that started from other runs, as long as their checkpoints can be read.
    """
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
    """Return the configuration of the same model for forward passes only, on its own layout.

    It is independent of the training layout, computes in one precision, attends to selected rows also after
    a warm-up of indexers, and has no modules of multi-token prediction, which only training uses. A loss of
    it is minus the log-probability of the target.

    cp ranks gather keys and values: the key-value cache needs them whole in any case.

    Raises:
        ConfigError: it is a reward model.
    """
    if config.model.output_head == "reward":
        raise ConfigError(
            "model.output_head = reward: this is a reward model, which predicts no tokens. Export it with "
            "megalite convert export, and score texts with transformers' AutoModelForSequenceClassification."
        )
    train = replace(
        config.train,
        global_batch_size=1,
        micro_batch_size=1,
        recompute="none",
        compile=False,
        grad_dtype="fp32",
        fp8="none",
        indexer="sparse",
        objective="cross_entropy",
        label_smoothing=0.0,
        z_loss=0.0,
    )
    train.precision = precision  # type: ignore[assignment]
    saving = replace(config.checkpoint, async_save=False)
    dispatch = dispatch_of(config.model)
    ep = 1 if dispatch is None else gcd(tp, dispatch.experts)  # experts too are split over tp ranks
    parallel = ParallelConfig(tp=tp, pp=pp, cp=cp, dp=1, context="gather", zero=0, ep=ep)
    model = without_further_losses(config.model)
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
    """Return the named tokenizer, else that of the training data, else the one stored with the weights.

    The tokenizer of the training data is read from the copy in the run if its original is gone.

    Args:
        allow_change: accept another tokenizer than the weights were trained with.
        tell: called with a line about such a change.

    Raises:
        ConfigError: there is no tokenizer or it does not fit the model.
    """
    tokenizer = tokenizing.load(name) if name is not None else _own_tokenizer(source)
    vocabulary = source.config.model.vocabulary
    if tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, but the model only "
            f"{vocabulary}. Pass the tokenizer of the training data with --tokenizer."
        )
    if name is not None or source.tokenizer.can_be_known:
        tokenized = Tokenized(
            "the tokenizer of the training data" if name is None else f"--tokenizer {name}",
            of_tokenizer(tokenizer.name),
            itself=True,
        )
        then = "" if is_there(source.tokenizer) else " in its original version"
        trained = f", {source.tokenizer.name}{then}," if source.tokenizer.name else ""
        way_out = f"Pass the tokenizer used in training{trained} with --tokenizer"
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
    """Return the PREFIX of the token file that a model was trained on, the first if there are several."""
    train = source.config.data.train
    return train if train is None or isinstance(train, str) else next(iter(train), None)


def _own_tokenizer(source: ModelSource) -> Tokenizer:
    if source.tokenizer.name is not None and is_there(source.tokenizer):  # at its place, or in the run
        return tokenizing.load(source.tokenizer.name)
    prefix = _training_data(source)
    if prefix is None and source.companions is None:
        raise ConfigError(
            "the checkpoint does not record its training data, so the tokenizer is unknown. Pass it with "
            "--tokenizer."
        )
    try:
        return tokenizing.load_for(prefix) if prefix is not None else tokenizing.load(source.companions or "")
    except ConfigError as error:
        what = (
            "the tokenizer of the training data"
            if prefix is not None
            else f"the tokenizer in {source.companions}"
        )
        raise ConfigError(
            f"{what} cannot be read: {error} Or pass another tokenizer with --tokenizer."
        ) from None


def opening(source: ModelSource, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before a prompt.

    BOS if the tokenizer adds one and the model was trained on texts that begin with it.
    """
    return (
        [tokenizer.bos]
        if tokenizer.adds_bos and tokenizer.bos is not None and not source.trained_here
        else []
    )


def end_tokens(source: ModelSource, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the tokens that end a text.

    The EOS of the tokenizer, and those in generation_config.json or else config.json.
    """
    return frozenset((tokenizer.eos, *([] if source.companions is None else end_ids(source.companions))))


def chat_template(source: ModelSource, tokenizer: Tokenizer, named: bool, file: Path | None) -> ChatTemplate:
    """Return the chat template of the model.

    It is read from the given file, else the training data, else the tokenizer, else our default.

    Args:
        named: whether the tokenizer was given by name, whose own template then goes before that of the
            training data.

    Raises:
        ConfigError: a file cannot be read, or the template of the training data is gone.
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
            f"{prefix}.json no longer contains the chat template that {source.name} was trained with "
            f"(hash {expected}). Pass it with --chat_template."
        )
    return template

"""What each unit of the model keeps of one microbatch on one rank, in bytes: from forward to backward, and on to a weight pass.

A line for each tensor that an autograd function of `megalite.model` and `megalite.parallel.tensor` saves, storages counted once. Shapes are
those of one tensor-parallel rank; under sequence parallelism what lies between linears is a tp-th of the sequence. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from megalite.build.plan import activation_shape
from megalite.config.schema import Config
from megalite.config.token_files import is_chat, prefixes
from megalite.model.parameters import head_unit, kv_replicas, padded_vocabulary
from megalite.parallel.spec import ParamSpec
from megalite.planning.states import Device, Widths

INDEX = 8  # bytes of a token or a target
ATTENTION_BLOCK = 64  # queries, of `megalite_kernels.attention`
ADAPTER = ".lora_a"  # of a stored matrix, the first of its two factors
WIDEST_HEAD = 256  # channels that its Triton kernels take
LOSS_CHUNK_ON_GPU = 4096  # tokens, of `megalite.model.stage`


@dataclass(frozen=True)
class Held:
    """Bytes of one microbatch on one unit.

    Attributes:
        saved: kept from the forward to the backward.
        recomputed: more while its own backward runs, which computes it again.
        stash: kept from a split backward to the weight pass; `stash_first` of it is made before anything saved is free.
        logits, logits_stash: the same as `saved` and `stash`, of logits and their gradient; `logits_chunk`: while the forward runs.
        workspace: largest temporaries of its backward, an estimate: gradients on their way, gathered inputs.
    """

    saved: int = 0
    recomputed: int = 0
    stash: int = 0
    stash_first: int = 0
    logits: int = 0
    logits_stash: int = 0
    logits_chunk: int = 0
    workspace: int = 0


class Activations:
    """The units of a configuration's model.

    Args:
        splits: whether backward is in two passes, so that weight gradients are put off.
        specs: the stored tensors of the rank: what is frozen, and what has adapters of low rank. By default everything is trained.
    """

    def __init__(self, config: Config, device: Device = "cuda", splits: bool = False, specs: Sequence[ParamSpec] = ()):
        model, parallel, widths = config.model, config.parallel, Widths.of(config)
        self.config, self.model, self.device, self.splits = config, model, device, splits
        self.frozen = {spec.name for spec in specs if not spec.trainable}
        adapters = (spec for spec in specs if spec.name.endswith(ADAPTER))
        self.adapters = {spec.name.removesuffix(ADAPTER): spec.local_shape(0, parallel.tp)[0] for spec in adapters}
        self.width, self.wide = widths.compute, widths.wide
        self.documents = config.data.reset_positions or any(map(is_chat, prefixes(config.data.train)))  # positions follow them
        self.sequence = config.data.sequence_length
        self.batch = config.train.micro_batch_size
        self.tokens = self.sequence * self.batch
        self.own_tokens = prod(activation_shape(config)[:2])
        self.heads = model.num_attention_heads // parallel.tp
        self.kv_heads = model.kv_heads * kv_replicas(model, parallel.tp) // parallel.tp
        self.query, self.packed = (count * model.head_size for count in (self.heads, self.heads + 2 * self.kv_heads))
        self.inner = model.intermediate_size // parallel.tp
        self.vocabulary = padded_vocabulary(model.vocabulary, parallel.tp) // parallel.tp
        self.own = prod(activation_shape(config)) * self.width
        self.whole = self.tokens * model.hidden_size * self.width  # the same, gathered

    @property
    def message(self) -> int:
        """Bytes of what travels between two stages."""
        return self.own

    def unit(self, number: int) -> Held:
        if number == 0:
            return self.embedding()
        return self.head() if number == head_unit(self.model) else self.layer(number - 1)

    def embedding(self) -> Held:
        """Which rows were looked up, and which of them lie on other ranks; learned positions."""
        positions = INDEX * self.sequence if self.model.position == "learned" else 0
        return Held(saved=self.tokens * (INDEX + 1) + positions + self._dropout(self.model.embedding_dropout))

    def _dropout(self, probability: float) -> int:
        """The positions that a mask is drawn for; the mask itself is drawn again."""
        return INDEX * self.own_tokens // self.batch if probability else 0

    def layer(self, index: int) -> Held:
        mode = self.config.train.recompute_of(index)
        kept = self._statistics_and_inputs(index) + self._attention(index, mode == "selective") + self._feed_forward(index)
        saved = self.own if mode == "full" else kept
        stash = self._layer_stash(index)
        freed = self.own + self._norm(self.own_tokens) if self.model.norm_placement != "pre" else 0  # by the norm behind the feed-forward
        shared = self._inner(f"layers.{index}.mlp.down")  # is among what was saved
        first = max(stash.get("mlp.down", 0) - shared - freed, 0)
        return Held(saved, kept - saved, sum(stash.values()), first, workspace=self._workspace())

    def _norm(self, tokens: int, groups: int = 1) -> int:
        """Statistics of a norm: rstd, of LayerNorm the mean too."""
        return tokens * groups * self.wide * (1 if self.model.norm == "rms" else 2)

    def _statistics_and_inputs(self, index: int) -> int:
        """Of both blocks: the residual stream where it enters, and where there are norms what they return and what they divide by."""
        before, after = self.model.norm_placement != "post", self.model.norm_placement != "pre"
        norm = self.own + self._norm(self.own_tokens)
        kept = 2 * (self.own + (norm if before else 0) + (norm if after else 0) + self._dropout(self.model.residual_dropout))
        columns = [f"layers.{index}.{name}" for name in ("attention.qkv", "mlp.in")]
        return kept - (sum(not self.trains(name) for name in columns) * self.own if before else 0)

    def trains(self, linear: str) -> bool:
        """Whether a linear layer has weight gradients, which need its input."""
        return f"{linear}.weight" not in self.frozen or linear in self.adapters

    def _inner(self, *linears: str) -> int:
        """What adapters keep between their two matrices."""
        return self.tokens * sum(self.adapters.get(linear, 0) for linear in linears) * self.width

    def _attention(self, index: int, recomputes: bool) -> int:
        """Queries, keys and values, beside them normed ones where they are normed; the output; the probabilities."""
        kept = self.tokens * (self.packed + self.query) * self.width + self._probabilities(index, recomputes)
        kept += self._inner(f"layers.{index}.attention.qkv", f"layers.{index}.attention.out")
        if self.model.qk_norm != "none":
            statistics = self.heads + self.kv_heads if self.model.qk_norm == "head" else 2
            kept += self.tokens * ((self.packed + self.query) // 2 * self.width + statistics * self.wide)
        return kept

    @property
    def flash(self) -> bool:
        """Whether a kernel computes attention that keeps a number for each query instead of probabilities."""
        model, train = self.model, self.config.train
        if self.device == "cpu" or train.precision not in ("bf16", "fp16"):
            return False
        options = (model.sliding_window, model.attention_softcap, model.attention_dropout or None, self.documents or None)
        plain = all(option is None for option in options) and not self.config.run.deterministic and model.head_size % 8 == 0
        return model.head_size <= WIDEST_HEAD and (plain or train.kernels != "torch")

    def _probabilities(self, index: int, recomputes: bool) -> int:
        """Of the blocks of queries that the reference computes: only the keys that some query of a block sees."""
        if self.flash:
            return self.tokens * self.heads * self.wide
        if recomputes or self.model.attention_softcap is not None:
            return 0
        window, total = self.model.window(index) or self.sequence, 0
        for first in range(0, self.sequence, ATTENTION_BLOCK):
            stop = min(first + ATTENTION_BLOCK, self.sequence)
            total += (stop - first) * (stop - max(first - window + 1, 0))
        return self.batch * self.heads * total * self.wide

    def _feed_forward(self, index: int) -> int:
        """The input of the activation, which is computed again."""
        inner = self._inner(f"layers.{index}.mlp.in", f"layers.{index}.mlp.down")
        return self.tokens * self.inner * (2 if self.model.gated_mlp else 1) * self.width + inner

    def _layer_stash(self, index: int) -> dict[str, int]:
        """For each linear its input and its output's gradient, both whole: what was gathered for the products stays."""
        inner = self.inner * (2 if self.model.gated_mlp else 1)
        linears = {
            "attention.qkv": self.whole + self.tokens * self.packed * self.width,
            "attention.out": self.tokens * self.query * self.width + self.whole,
            "mlp.in": self.whole + self.tokens * inner * self.width,
            "mlp.down": self.tokens * self.inner * self.width + self.whole,
        }
        found = {name: (size, f"layers.{index}.{name}") for name, size in linears.items() if self.splits}
        return {name: size + 2 * self._inner(linear) for name, (size, linear) in found.items() if self.trains(linear)}

    def _workspace(self) -> int:
        """The feed-forward's or attention's backward, whichever is larger, and the gradient of the residual stream."""
        gate_up = self.inner * (2 if self.model.gated_mlp else 1)
        feed_forward = self.whole + self.tokens * (2 * self.inner + gate_up) * self.width
        attention = self.tokens * (self.query + 2 * self.packed) * self.width
        if not self.flash:  # the reference works on copies of at least fp32
            attention += self.tokens * 2 * (self.query + self.packed) * self.wide
        return self.own + max(feed_forward, attention)

    @property
    def loss_chunk(self) -> int:
        """Tokens whose logits exist at a time; 0 where all do, from forward to backward."""
        chunk, ranks = self.config.train.loss_chunk, self.tokens // self.own_tokens
        chunk = (LOSS_CHUNK_ON_GPU if self.device == "cuda" else 0) if chunk is None else chunk
        if not chunk or self.splits:
            return 0
        positions = self.sequence // ranks
        return min(max(chunk * positions // self.tokens, 1), positions) * ranks * self.batch

    def head(self) -> Held:
        """The final norm's input and output (or the gradient that was computed with the loss), and the logits."""
        trains = self.trains("embedding" if self.model.tie_word_embeddings else "head")
        kept = (2 if trains or self.loss_chunk else 1) * self.own + self._norm(self.own_tokens)
        one = self.vocabulary * self.width * (1 if self.model.logit_softcap is None else 2)  # tanh keeps its output
        if chunk := self.loss_chunk:
            return Held(kept, logits_chunk=chunk * one, workspace=self.own)
        stash = self.splits and trains
        return Held(
            saved=kept + self.tokens * (2 * self.wide + INDEX),
            stash=self.whole if stash else 0,
            logits=self.tokens * one,
            logits_stash=self.tokens * self.vocabulary * self.width if stash else 0,
            workspace=2 * self.whole,
        )

    def stage(self, numbers: Sequence[int]) -> list[Held]:
        """The units of a stage, first to last. Where positions depend on the documents, so do a microbatch's rotary tables."""
        units = [self.unit(number) for number in numbers]
        if self.documents:
            units[0] = replace(units[0], saved=units[0].saved + self.batch * self._rotary(numbers))
        return units

    def tables(self, numbers: Sequence[int]) -> int:
        """What a stage keeps for good: rotary tables."""
        return 0 if self.documents else self._rotary(numbers)

    def _rotary(self, numbers: Sequence[int]) -> int:
        rotates = any(self.model.uses_rope(number - 1) for number in numbers if 0 < number < head_unit(self.model))
        return 2 * self.sequence * self.model.head_size * self.width if rotates else 0

"""The model's stored parameters as specs, unit by unit: computed only from the configuration.

Units: 0 is the embedding, 1 … L the layers, L + 1 the final norm and the head, with the modules of
multi-token prediction. Global names: `embedding.weight`, `layers.3.attention.q.weight`,
`layers.3.mlp.up.weight`, `norm.weight`, `head.weight`. The modules of multi-token prediction have the layers
after the last one; what else is theirs is `layers.61.mtp.enorm.weight`, `….hnorm`, `….eh_proj` and `….norm`.
Those of adapters follow from these: `model.adapter_parameters`.
Stored names differ where segments are fused: `layers.3.attention.qkv.weight` holds q, k and v,
`layers.3.mlp.in.weight` gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import sqrt

from megalite.config.schema import ModelConfig
from megalite.parallel.spec import ParamSpec, Segment, parameter_count

VOCAB_ALIGN = 8  # vocabulary rows per tp rank are padded to a multiple of this


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Number of embedding rows over all tp ranks, padding included: equal parts, each a multiple of
    VOCAB_ALIGN."""
    per_rank = -(-vocab_size // tp)
    return tp * -(-per_rank // VOCAB_ALIGN) * VOCAB_ALIGN


def kv_replicas(model: ModelConfig, tp: int) -> int:
    """Number of tp ranks that hold the same key-value head."""
    return max(1, tp // model.kv_heads)


def head_unit(model: ModelConfig) -> int:
    """The last unit: final norm and head."""
    return model.num_hidden_layers + 1


def layer_count(model: ModelConfig) -> int:
    """Number of layers, those of the modules of multi-token prediction included, which are the last ones."""
    return model.num_hidden_layers + model.mtp_layers


def layers_in(model: ModelConfig, unit: int) -> range:
    """The layers (0-based) of a unit: one, none in the embedding, in the last unit those of modules of
    multi-token prediction."""
    last = head_unit(model)
    return (
        range(model.num_hidden_layers, layer_count(model))
        if unit == last
        else range(unit - 1, unit)
        if unit
        else range(0)
    )


def stage_units(partition: Sequence[int], stage: int) -> range:
    """Units of a pipeline stage, given the number of layers of each stage."""
    first = sum(partition[:stage])
    last = stage == len(partition) - 1
    return range(0 if stage == 0 else first + 1, first + partition[stage] + 1 + int(last))


def _each_alone(unit: int, *segments: Segment) -> list[ParamSpec]:
    """One stored tensor per segment."""
    return [ParamSpec(segment.name, unit, (segment,)) for segment in segments]


class _Specs:
    """Builds the specs of one model for a tp size; `sequence_parallel` determines whose gradients are
    partial."""

    def __init__(self, model: ModelConfig, tp: int, sequence_parallel: bool):
        self.model, self.tp = model, tp
        # Under sequence parallelism norms, positions and row biases see 1/tp of the sequence: their gradients
        # must be summed over tp.
        self.partial_axis = "tp" if sequence_parallel and tp > 1 else None
        self.std = model.initializer_range
        # of row-parallel weights, which add to the residual twice a layer
        self.out_std = self.std / sqrt(2 * model.num_hidden_layers)

    def norm(
        self,
        name: str,
        unit: int,
        width: int | None = None,
        *,
        axis: str | None = None,
        rms: bool | None = None,
    ) -> list[ParamSpec]:
        """Weight, and bias of a LayerNorm: [width or hidden]. `axis`: over which gradients are partial even
        without a split sequence."""
        axis = axis or self.partial_axis
        rms = self.model.norm == "rms" if rms is None else rms
        shape, one = (width or self.model.hidden_size,), 1.0 - self.model.norm_offset
        weight = Segment(
            f"{name}.weight", shape, grad_partial_axis=axis, decay=False, init_value=one, role="norms"
        )
        bias = Segment(f"{name}.bias", shape, grad_partial_axis=axis, decay=False, role="norms")
        return (
            _each_alone(unit, weight) if rms or not self.model.norm_bias else _each_alone(unit, weight, bias)
        )

    def column(
        self, name: str, unit: int, parts: Sequence[tuple[str, int, int]], bias: bool
    ) -> list[ParamSpec]:
        """A column-parallel linear of (part name, output width, replicas) segments: weights [width, hidden],
        split along dim 0."""
        hidden = self.model.hidden_size
        prefix = name.rsplit(".", 1)[0]
        weights = tuple(
            Segment(f"{prefix}.{part}.weight", (width, hidden), 0, copies, init_std=self.std, role=part)
            for part, width, copies in parts
        )
        biases = tuple(
            Segment(f"{prefix}.{part}.bias", (width,), 0, copies, decay=False)
            for part, width, copies in parts
        )
        return [
            ParamSpec(f"{name}.weight", unit, weights),
            *([ParamSpec(f"{name}.bias", unit, biases)] if bias else []),
        ]

    def qk_norm(self, name: str, unit: int, q: int, kv: int) -> list[ParamSpec]:
        """Per head: one weight [head_dim] for all heads. Full width and each head: weights [width], split as
        the heads are."""
        if self.model.qk_norm == "head":
            # each rank's gradient is of its own heads only
            axis, parts = "tp" if self.tp > 1 else None, ("q_norm", "k_norm")
            return [
                spec
                for part in parts
                for spec in self.norm(f"{name}.{part}", unit, self.model.head_size, axis=axis, rms=True)
            ]
        if self.model.qk_norm == "none":
            return []
        one, copies = 1.0 - self.model.norm_offset, kv_replicas(self.model, self.tp)
        segments = (
            Segment(f"{name}.{part}.weight", (width,), 0, replicas, decay=False, init_value=one, role="norms")
            for part, width, replicas in (("q_norm", q, 1), ("k_norm", kv, copies))
        )
        return _each_alone(unit, *segments)

    def sinks(self, name: str, unit: int) -> list[ParamSpec]:
        """One number for each head."""
        return _each_alone(
            unit, Segment(name, (self.model.num_attention_heads,), 0, decay=False, init_std=self.std)
        )

    def row(self, name: str, role: str, unit: int, width: int, bias: bool) -> list[ParamSpec]:
        """A row-parallel linear: weight [hidden, width], split along dim 1; the bias is replicated and added
        after the sum over tp."""
        hidden = self.model.hidden_size
        weight = Segment(f"{name}.weight", (hidden, width), 1, init_std=self.out_std, role=role)
        addend = Segment(f"{name}.bias", (hidden,), grad_partial_axis=self.partial_axis, decay=False)
        return _each_alone(unit, weight, addend) if bias else _each_alone(unit, weight)

    def embedding(self, both_ends: bool) -> list[ParamSpec]:
        """Token embedding and learned positions. `both_ends`: the rank has the last stage, too, which may use
        the table."""
        model = self.model
        table = self._vocabulary("embedding.weight")
        later = self.embedding_uses
        shared = both_ends and later > 0
        specs = [
            ParamSpec(
                table.name,
                0,
                (table,),
                tied=later > 0,
                both_ends=shared,
                contributions=1 + (later if shared else 0),
            )
        ]
        if model.position == "learned":
            shape = (model.max_position_embeddings, model.hidden_size)
            positions = Segment(
                "positions.weight", shape, grad_partial_axis=self.partial_axis, init_std=self.std
            )
            specs += _each_alone(0, positions)
        return specs

    @property
    def embedding_uses(self) -> int:
        """How often the last stage uses the embedding in a microbatch: each module looks up tokens; tied, it
        is the head of all losses."""
        modules = self.model.mtp_layers
        return modules + (1 + modules if self.model.tie_word_embeddings else 0)

    def _vocabulary(self, name: str, copy: bool = False) -> Segment:
        """A table [vocabulary, hidden], split along dim 0, in memory padded to equal parts."""
        rows = padded_vocabulary(self.model.vocabulary, self.tp)
        shape, role = (self.model.vocabulary, self.model.hidden_size), name.removesuffix(".weight")
        return Segment(name, shape, 0, padded=rows, copy=copy, init_std=self.std, role=role)

    def layer(self, index: int) -> list[ParamSpec]:
        """Attention and feed-forward of layer `index`, each with its norms, in the order of the forward."""
        model, unit, name = self.model, min(index + 1, head_unit(self.model)), f"layers.{index}"
        head, copies = model.head_size, kv_replicas(model, self.tp)
        specs = []
        for block, before, after in (
            ("attention", "input_norm", "attention.output_norm"),
            ("mlp", "mlp_norm", "mlp.output_norm"),
        ):
            if model.norm_placement != "post" and not (
                block == "mlp" and model.parallel_block == "shared_norm"
            ):
                specs += self.norm(f"{name}.{before}", unit)
            if block == "attention" and model.kv_lora_rank is not None:
                specs += self.latent_attention(f"{name}.attention", unit, model.kv_lora_rank)
            elif block == "attention":
                q, kv = model.num_attention_heads * head, model.kv_heads * head
                parts: tuple[tuple[str, int, int], ...] = (("q", q, 1), ("k", kv, copies), ("v", kv, copies))
                specs += self.column(f"{name}.attention.qkv", unit, parts, model.attention_bias)
                specs += self.qk_norm(f"{name}.attention", unit, q, kv)
                specs += self.sinks(f"{name}.attention.sinks.weight", unit) if model.attention_sinks else []
                specs += self.row(f"{name}.attention.out", "o", unit, q, model.attention_out_bias)
            elif model.is_mixture(index):
                specs += self.mixture(f"{name}.mlp", unit)
            else:
                specs += self.feed_forward(f"{name}.mlp", unit, model.intermediate_size)
            if model.norm_placement != "pre":
                specs += self.norm(f"{name}.{after}", unit)
        return specs

    def latent_attention(self, name: str, unit: int, rank: int) -> list[ParamSpec]:
        """Multi-head latent attention: all tp ranks hold the matrices that make latents, each those of its
        heads that read them.

        Rows of `q_b` (`q` without a latent of queries) by head: what does not rotate, then what does. Rows of
        `kv_a`: the latent, then the shared key that rotates. Rows of `kv_b` by head: the key, then the value.
        """
        model, heads = self.model, self.model.num_attention_heads
        queries, q_rank = heads * model.head_size, model.q_lora_rank

        def up(part: str, outputs: int, inputs: int) -> list[ParamSpec]:
            return _each_alone(
                unit, Segment(f"{name}.{part}.weight", (outputs, inputs), 0, init_std=self.std, role=part)
            )

        def latent(part: str, outputs: int, width: int) -> list[ParamSpec]:
            made = self._of_own_tokens(f"{name}.{part}.weight", unit, outputs, part)
            return made + self.norm(f"{name}.{part}_norm", unit, width, rms=True)

        specs = (
            up("q", queries, model.hidden_size)
            if q_rank is None
            else latent("q_a", q_rank, q_rank) + up("q_b", queries, q_rank)
        )
        specs += latent("kv_a", rank + model.qk_rope_head_dim, rank)
        specs += up("kv_b", heads * (model.qk_nope_head_dim + model.v_head_dim), rank)
        return specs + self.row(f"{name}.out", "o", unit, heads * model.v_head_dim, False)

    def feed_forward(self, name: str, unit: int, width: int) -> list[ParamSpec]:
        parts = (("gate", width, 1), ("up", width, 1)) if self.model.gated_mlp else (("up", width, 1),)
        into = self.column(f"{name}.in", unit, parts, self.model.mlp_bias)
        return into + self.row(f"{name}.down", "down", unit, width, self.model.mlp_bias)

    def mixture(self, name: str, unit: int) -> list[ParamSpec]:
        """Router [experts, hidden], experts, and the shared expert.

        The experts of a layer are two stored tensors, expert after expert: `experts.in` [experts · (2 ·)
        width, hidden], in each expert its gate, then its up; `experts.down` [experts · hidden, width]. An
        expert is whole on its ranks.
        """
        model, hidden, experts = self.model, self.model.hidden_size, self.model.num_experts or 0
        fused, width = 2 if model.gated_mlp else 1, model.expert_width
        stacked = partial(Segment, split=0, axis="expert", experts=experts)
        shape = (experts * fused * width, hidden)
        into = stacked(f"{name}.experts.in.weight", shape, init_std=self.std, role="experts.in", fused=fused)
        down = stacked(
            f"{name}.experts.down.weight",
            (experts * hidden, width),
            init_std=self.out_std,
            role="experts.down",
        )
        specs = self._of_own_tokens(f"{name}.router.weight", unit, experts)
        if model.router_logit_bias:
            bias = Segment(
                f"{name}.router.bias",
                (experts,),
                grad_partial_axis=self.partial_axis,
                decay=False,
                init_std=self.std,
            )
            specs += _each_alone(unit, bias)
        found = [into, down]
        if model.mlp_bias:
            sizes = {"in": fused * width, "down": hidden}
            found += [
                stacked(f"{name}.experts.{part}.bias", (experts * size,), decay=False)
                for part, size in sizes.items()
            ]
        specs += [ParamSpec(each.name, unit, (each,), domain="expert") for each in found]
        if model.shared_expert_intermediate_size:
            specs += self.feed_forward(f"{name}.shared", unit, model.shared_expert_intermediate_size)
            specs += (
                self._of_own_tokens(f"{name}.shared_gate.weight", unit, 1) if model.shared_expert_gate else []
            )
        return specs

    def _of_own_tokens(
        self, name: str, unit: int, outputs: int, role: str = "", wider: int = 1
    ) -> list[ParamSpec]:
        """A matrix [outputs, wider · hidden] that every tp rank multiplies its own part of the sequence
        with."""
        shape = (outputs, wider * self.model.hidden_size)
        return _each_alone(
            unit, Segment(name, shape, grad_partial_axis=self.partial_axis, init_std=self.std, role=role)
        )

    def head(self, holds_embedding: bool) -> list[ParamSpec]:
        """Final norm, head, and modules of multi-token prediction. Where these or a tied head use the
        embedding on a rank without it, the rank stores a copy, which is neither counted nor saved."""
        model, unit = self.model, head_unit(self.model)
        specs = self.norm("norm", unit)
        if not model.tie_word_embeddings:
            weight = self._vocabulary("head.weight")
            specs.append(ParamSpec(weight.name, unit, (weight,), contributions=1 + model.mtp_layers))
        if self.embedding_uses and not holds_embedding:
            weight = self._vocabulary("embedding.weight", copy=True)
            specs.append(
                ParamSpec(weight.name, unit, (weight,), tied=True, contributions=self.embedding_uses)
            )
        for index in range(model.num_hidden_layers, layer_count(model)):
            name = f"layers.{index}.mtp"
            specs += self.norm(f"{name}.enorm", unit) + self.norm(f"{name}.hnorm", unit)
            specs += self._of_own_tokens(f"{name}.eh_proj.weight", unit, model.hidden_size, wider=2)
            specs += self.layer(index) + self.norm(f"{name}.norm", unit)
        return specs


def active_parameters(model: ModelConfig) -> int:
    """Number of parameters that one token meets: of each mixture, only the experts that process it."""
    idle = max((model.num_experts or 0) - model.num_experts_per_tok, 0)
    expert = (3 if model.gated_mlp else 2) * model.hidden_size * model.expert_width
    expert += (model.hidden_size + (2 if model.gated_mlp else 1) * model.expert_width) * model.mlp_bias
    return parameter_count(model_specs(model)) - idle * expert * sum(
        map(model.is_mixture, range(layer_count(model)))
    )


def model_specs(
    model: ModelConfig, *, tp: int = 1, sequence_parallel: bool = False, units: Iterable[int] | None = None
) -> list[ParamSpec]:
    """The stored parameters of the given units (default: all) for a tp size, in the model's order."""
    build = _Specs(model, tp, sequence_parallel)
    last = head_unit(model)
    wanted = list(range(last + 1)) if units is None else list(units)
    specs: list[ParamSpec] = []
    for unit in wanted:
        if unit == 0:
            specs += build.embedding(both_ends=last in wanted)
        elif unit == last:
            specs += build.head(holds_embedding=0 in wanted)
        else:
            specs += build.layer(unit - 1)
    return specs

"""The specs of the model's stored parameters, unit by unit, computed from the configuration alone.

Units: 0 is the embedding, 1 … L the layers, L + 1 the final norm and the head, with the modules of
multi-token prediction (MTP). Global names: `embedding.weight`, `layers.3.attention.q.weight`,
`layers.3.mlp.up.weight`, `norm.weight`, `head.weight`. MTP modules have the layers after the last one; their
other parameters are `layers.61.mtp.enorm.weight`, `….hnorm`, `….eh_proj` and `….norm`. The parameters of
adapters follow from these (`model.adapter_parameters`).
Stored names differ where segments are fused: `layers.3.attention.qkv.weight` has q, k and v,
`layers.3.mlp.in.weight` gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt

from megalite.config.sections.model import ModelConfig
from megalite.parallel.spec import ParamSpec, Segment, parameter_count

VOCAB_ALIGN = 8  # vocabulary rows per tp rank are padded to a multiple of this


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Returns the number of embedding rows over all tp ranks, padding included: parts of the same size, each
    a multiple of VOCAB_ALIGN."""
    per_rank = -(-vocab_size // tp)
    return tp * -(-per_rank // VOCAB_ALIGN) * VOCAB_ALIGN


def kv_replicas(model: ModelConfig, tp: int) -> int:
    """Returns the number of tp ranks that hold the same key-value head."""
    return max(1, tp // model.kv_heads)


def head_unit(model: ModelConfig) -> int:
    """Returns the last unit: final norm and head."""
    return model.num_hidden_layers + 1


def layer_count(model: ModelConfig) -> int:
    """Returns the number of layers, with those of MTP modules, which come last."""
    return model.num_hidden_layers + model.mtp_layers


def layers_in(model: ModelConfig, unit: int) -> range:
    """Returns the layers (0-based) of a unit: one; none in the embedding; in the last unit those of MTP
    modules."""
    if unit == 0:
        return range(0)
    if unit == head_unit(model):
        return range(model.num_hidden_layers, layer_count(model))
    return range(unit - 1, unit)


def stage_units(partition: Sequence[int], stage: int) -> range:
    """Returns the units of a pipeline stage.

    Args:
        partition: the number of layers of each stage.
    """
    first = sum(partition[:stage])
    is_last = stage == len(partition) - 1
    return range(0 if stage == 0 else first + 1, first + partition[stage] + 1 + int(is_last))


def _one_each(unit: int, *segments: Segment) -> list[ParamSpec]:
    """Returns one stored tensor for each segment."""
    return [ParamSpec(segment.name, unit, (segment,)) for segment in segments]


class _Specs:
    """Builds the specs of one model for a tp size.

    Args:
        sequence_parallel: determines which gradients are partial.
    """

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
        """Returns the weight of a norm, and the bias of a LayerNorm: [width or hidden].

        Args:
            axis: the axis over which gradients are partial even if the sequence is not split.
        """
        axis = axis or self.partial_axis
        rms = self.model.norm == "rms" if rms is None else rms
        shape, one = (width or self.model.hidden_size,), 1.0 - self.model.norm_offset
        weight = Segment(
            f"{name}.weight", shape, grad_partial_axis=axis, decay=False, init_value=one, role="norms"
        )
        if rms or not self.model.norm_bias:
            return _one_each(unit, weight)
        bias = Segment(f"{name}.bias", shape, grad_partial_axis=axis, decay=False, role="norms")
        return _one_each(unit, weight, bias)

    def column(
        self, name: str, unit: int, parts: Sequence[tuple[str, int, int]], bias: bool
    ) -> list[ParamSpec]:
        """Returns a column-parallel linear: weights [width, hidden], split along dim 0.

        Args:
            parts: (name, output width, replicas) of each segment.
        """
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
        weight = ParamSpec(f"{name}.weight", unit, weights)
        return [weight, ParamSpec(f"{name}.bias", unit, biases)] if bias else [weight]

    def qk_norm(self, name: str, unit: int, q: int, kv: int) -> list[ParamSpec]:
        """Returns the norms of queries and keys. head: one weight [head_dim] for all heads; full and
        each_head: weights [width], split like the heads."""
        if self.model.qk_norm == "head":
            # each rank's gradient is of its own heads only
            axis, width = "tp" if self.tp > 1 else None, self.model.head_size
            q_norm = self.norm(f"{name}.q_norm", unit, width, axis=axis, rms=True)
            return q_norm + self.norm(f"{name}.k_norm", unit, width, axis=axis, rms=True)
        if self.model.qk_norm == "none":
            return []
        one, copies = 1.0 - self.model.norm_offset, kv_replicas(self.model, self.tp)
        segments = (
            Segment(f"{name}.{part}.weight", (width,), 0, replicas, decay=False, init_value=one, role="norms")
            for part, width, replicas in (("q_norm", q, 1), ("k_norm", kv, copies))
        )
        return _one_each(unit, *segments)

    def sinks(self, name: str, unit: int) -> list[ParamSpec]:
        """Returns one number for each head."""
        heads = self.model.num_attention_heads
        return _one_each(unit, Segment(name, (heads,), 0, decay=False, init_std=self.std))

    def row(self, name: str, role: str, unit: int, width: int, bias: bool) -> list[ParamSpec]:
        """Returns a row-parallel linear: weight [hidden, width], split along dim 1; the bias is replicated
        and added after the sum over tp."""
        hidden = self.model.hidden_size
        segments = [Segment(f"{name}.weight", (hidden, width), 1, init_std=self.out_std, role=role)]
        if bias:
            axis = self.partial_axis
            segments.append(Segment(f"{name}.bias", (hidden,), grad_partial_axis=axis, decay=False))
        return _one_each(unit, *segments)

    def embedding(self, both_ends: bool) -> list[ParamSpec]:
        """Returns token embedding and learned positions.

        Args:
            both_ends: whether the rank has the last stage, too, which may use the table.
        """
        model, table, uses = self.model, self._vocabulary("embedding.weight"), self.embedding_uses
        tied = uses > 0
        shared = both_ends and tied
        contributions = 1 + uses if shared else 1
        specs = [ParamSpec(table.name, 0, (table,), tied, contributions, both_ends=shared)]
        if model.position == "learned":
            shape = (model.max_position_embeddings, model.hidden_size)
            positions = Segment(
                "positions.weight", shape, grad_partial_axis=self.partial_axis, init_std=self.std
            )
            specs += _one_each(0, positions)
        return specs

    @property
    def embedding_uses(self) -> int:
        """How often the last stage uses the embedding in a microbatch: each MTP module looks up tokens; if
        tied, it is the head of all losses."""
        modules = self.model.mtp_layers
        return modules + (1 + modules if self.model.tie_word_embeddings else 0)

    def _vocabulary(self, name: str, copy: bool = False) -> Segment:
        """Returns a table [vocabulary, hidden], split along dim 0; in memory it is padded to parts of the
        same size."""
        rows = padded_vocabulary(self.model.vocabulary, self.tp)
        shape, role = (self.model.vocabulary, self.model.hidden_size), name.removesuffix(".weight")
        return Segment(name, shape, 0, padded=rows, copy=copy, init_std=self.std, role=role)

    def layer(self, index: int) -> list[ParamSpec]:
        """Returns attention and feed-forward of layer `index`, each with its norms, in the order of the
        forward."""
        model, unit, name = self.model, min(index + 1, head_unit(self.model)), f"layers.{index}"
        before, after = model.norm_placement != "post", model.norm_placement != "pre"
        specs = self.norm(f"{name}.input_norm", unit) if before else []
        if model.kv_lora_rank is not None:
            specs += self.latent_attention(f"{name}.attention", unit, model.kv_lora_rank)
        else:
            specs += self.attention(f"{name}.attention", unit)
        if after:
            specs += self.norm(f"{name}.attention.output_norm", unit)
        if before and model.parallel_block != "shared_norm":
            specs += self.norm(f"{name}.mlp_norm", unit)
        if model.is_mixture(index):
            specs += self.moe(f"{name}.mlp", unit)
        else:
            specs += self.feed_forward(f"{name}.mlp", unit, model.intermediate_size)
        if after:
            specs += self.norm(f"{name}.mlp.output_norm", unit)
        return specs

    def attention(self, name: str, unit: int) -> list[ParamSpec]:
        """Returns attention with grouped key-value heads."""
        model, copies = self.model, kv_replicas(self.model, self.tp)
        q, kv = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
        specs = self.column(
            f"{name}.qkv", unit, [("q", q, 1), ("k", kv, copies), ("v", kv, copies)], model.attention_bias
        )
        specs += self.qk_norm(name, unit, q, kv)
        if model.attention_sinks:
            specs += self.sinks(f"{name}.sinks.weight", unit)
        return specs + self.row(f"{name}.out", "o", unit, q, model.attention_out_bias)

    def latent_attention(self, name: str, unit: int, rank: int) -> list[ParamSpec]:
        """Returns multi-head latent attention. All tp ranks hold the matrices that compute latents, and each
        the rows of its heads of the matrices that read them.

        Rows of `q_b` (`q` without a latent of queries), by head: the channels that do not rotate, then those
        that do. Rows of `kv_a`: the latent, then the shared key that rotates. Rows of `kv_b`, by head: the
            key, then the value.
        """
        model, heads = self.model, self.model.num_attention_heads
        queries, q_rank = heads * model.head_size, model.q_lora_rank

        def up(part: str, outputs: int, inputs: int) -> list[ParamSpec]:
            weight = Segment(f"{name}.{part}.weight", (outputs, inputs), 0, init_std=self.std, role=part)
            return _one_each(unit, weight)

        def latent(part: str, outputs: int, width: int) -> list[ParamSpec]:
            specs = self._of_own_tokens(f"{name}.{part}.weight", unit, outputs, part)
            return specs + self.norm(f"{name}.{part}_norm", unit, width, rms=True)

        if q_rank is None:
            specs = up("q", queries, model.hidden_size)
        else:
            specs = latent("q_a", q_rank, q_rank) + up("q_b", queries, q_rank)
        specs += latent("kv_a", rank + model.qk_rope_head_dim, rank)
        specs += up("kv_b", heads * (model.qk_nope_head_dim + model.v_head_dim), rank)
        return specs + self.row(f"{name}.out", "o", unit, heads * model.v_head_dim, False)

    def feed_forward(self, name: str, unit: int, width: int) -> list[ParamSpec]:
        parts = [("gate", width, 1), ("up", width, 1)] if self.model.gated_mlp else [("up", width, 1)]
        specs = self.column(f"{name}.in", unit, parts, self.model.mlp_bias)
        return specs + self.row(f"{name}.down", "down", unit, width, self.model.mlp_bias)

    def moe(self, name: str, unit: int) -> list[ParamSpec]:
        """Returns the router [experts, hidden], the experts, and the shared expert.

        The experts of a layer are two stored tensors, expert after expert: `experts.in` [experts · (2 ·)
        width, hidden], in each expert its gate, then its up; `experts.down` [experts · hidden, width]. An
        expert is whole on its ranks.
        """
        model, hidden, experts = self.model, self.model.hidden_size, self.model.num_experts or 0
        fused, width = 2 if model.gated_mlp else 1, model.expert_width
        stacked = partial(Segment, split=0, axis="expert", experts=experts)
        specs = self._of_own_tokens(f"{name}.router.weight", unit, experts)
        if model.router_logit_bias:
            bias = Segment(f"{name}.router.bias", (experts,), decay=False, init_std=self.std)
            specs += _one_each(unit, replace(bias, grad_partial_axis=self.partial_axis))
        shape = (experts * fused * width, hidden)
        segments = [
            stacked(f"{name}.experts.in.weight", shape, init_std=self.std, role="experts.in", fused=fused)
        ]
        shape = (experts * hidden, width)
        segments.append(
            stacked(f"{name}.experts.down.weight", shape, init_std=self.out_std, role="experts.down")
        )
        if model.mlp_bias:
            segments.append(stacked(f"{name}.experts.in.bias", (experts * fused * width,), decay=False))
            segments.append(stacked(f"{name}.experts.down.bias", (experts * hidden,), decay=False))
        specs += [ParamSpec(segment.name, unit, (segment,), domain="expert") for segment in segments]
        if model.shared_expert_intermediate_size:
            specs += self.feed_forward(f"{name}.shared", unit, model.shared_expert_intermediate_size)
            if model.shared_expert_gate:
                specs += self._of_own_tokens(f"{name}.shared_gate.weight", unit, 1)
        return specs

    def _of_own_tokens(
        self, name: str, unit: int, outputs: int, role: str = "", wider: int = 1
    ) -> list[ParamSpec]:
        """Returns a matrix [outputs, wider · hidden] by which every tp rank multiplies its own part of the
        sequence."""
        shape, axis = (outputs, wider * self.model.hidden_size), self.partial_axis
        return _one_each(unit, Segment(name, shape, grad_partial_axis=axis, init_std=self.std, role=role))

    def head(self, holds_embedding: bool) -> list[ParamSpec]:
        """Returns the final norm, the head, and MTP modules. Where these or a tied head use the embedding on
        a rank without it, the rank stores a copy, which is neither counted nor saved."""
        model, unit = self.model, head_unit(self.model)
        specs = self.norm("norm", unit)
        if not model.tie_word_embeddings:
            weight = self._vocabulary("head.weight")
            specs.append(ParamSpec(weight.name, unit, (weight,), contributions=1 + model.mtp_layers))
        if self.embedding_uses and not holds_embedding:
            weight, uses = self._vocabulary("embedding.weight", copy=True), self.embedding_uses
            specs.append(ParamSpec(weight.name, unit, (weight,), tied=True, contributions=uses))
        for index in range(model.num_hidden_layers, layer_count(model)):
            name = f"layers.{index}.mtp"
            specs += self.norm(f"{name}.enorm", unit) + self.norm(f"{name}.hnorm", unit)
            specs += self._of_own_tokens(f"{name}.eh_proj.weight", unit, model.hidden_size, wider=2)
            specs += self.layer(index) + self.norm(f"{name}.norm", unit)
        return specs


def active_parameters(model: ModelConfig) -> int:
    """Returns the number of active parameters per token: in each MoE layer, only the experts that process
    it."""
    idle = max((model.num_experts or 0) - model.num_experts_per_tok, 0)
    fused = 2 if model.gated_mlp else 1
    expert = (fused + 1) * model.hidden_size * model.expert_width
    if model.mlp_bias:
        expert += model.hidden_size + fused * model.expert_width
    moe_layers = sum(model.is_mixture(layer) for layer in range(layer_count(model)))
    return parameter_count(model_specs(model)) - idle * expert * moe_layers


def model_specs(
    model: ModelConfig, *, tp: int = 1, sequence_parallel: bool = False, units: Iterable[int] | None = None
) -> list[ParamSpec]:
    """Returns the stored parameters of units (default: all) for a tp size, in the model's order."""
    build, last = _Specs(model, tp, sequence_parallel), head_unit(model)
    selected = list(range(last + 1)) if units is None else list(units)
    specs: list[ParamSpec] = []
    for unit in selected:
        if unit == 0:
            specs += build.embedding(both_ends=last in selected)
        elif unit == last:
            specs += build.head(holds_embedding=0 in selected)
        else:
            specs += build.layer(unit - 1)
    return specs

"""Causal self-attention with grouped key-value heads; each tp rank computes its own heads.

Column-parallel query-key-value projection, attention over this rank's heads, row-parallel output projection.
`compute` and `gradient` are its forward and backward as a part of a node of autograd's graph; `operations`
has it with a node for each operation. Communicates in the two linears, in a query-key norm over the full
width (`FullWidthRMSNorm`), and under context parallelism in `parallel.context`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite_kernels.attention import backward_of_kept, forward_keeping
from megalite_kernels.dropout import AttentionDropout
from megalite_kernels.rotary import rotate
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import Mesh
from megalite.model.block_kind import BlockSpec
from megalite.model.blocks.attention.operations import AttentionByOperation, WholeRowAttention
from megalite.model.blocks.attention.parameters import on_one_rank
from megalite.model.forward_state import ForwardState, Site
from megalite.model.layer_options import LayerOptions
from megalite.parallel.node import Saved
from megalite.parallel.tensor.head_norms import EachHeadLayerNorm, FullWidthRMSNorm
from megalite.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.tensor.norm import Norm, RMSNorm
from megalite.parallel.tensor.norm_weights import NO_WEIGHT
from megalite.parallel.weight import Weights


def attention_over(options: LayerOptions, mesh: Mesh) -> Callable[..., Tensor] | None:
    """Return the attention operation under context parallelism, or None if cp is 1.

    Each rank's part of a sequence attends to the whole sequence (`parallel.context`).
    """
    if mesh.cp.size == 1:
        return None
    from megalite.parallel.context import attend

    return attend.attention_over(mesh.cp, options.share.context, mesh.cp_levels)


class Attention(AttentionByOperation):
    """Self-attention: [seq (/tp), batch, hidden] -> the same shape.

    Under sequence parallelism each tp rank has seq/tp positions.
    """

    def __init__(
        self, model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
    ):
        super().__init__()
        name, layer = block.name, block.layer
        tp, sequence_parallel = mesh.tp, options.sequence_parallel
        self.layer, self.model_config, self.options, self.ops = layer, model, options, options.ops
        shape = on_one_rank(model.attention_shape(layer), tp.size)
        self.heads, self.kv_heads, self.head_dim, self.value_dim, _ = shape
        # of queries, keys and values in the packed projection, which a gate follows
        self.before_gate = (self.heads + self.kv_heads) * self.head_dim + self.kv_heads * self.value_dim
        self.window = model.window(layer)
        # a factor on the input is one on queries and keys; that on values is a part of `output_factor`
        factor = model.attention_in_multiplier**2 * model.key_multiplier
        self.scale = (model.attention_scale or self.head_dim**-0.5) * factor
        self.recomputes_scores = options.recomputes("scores")
        self.first_head = self.heads * tp.rank  # global index: part of the key of attention dropout
        self.uses_rope, self.local_rope = model.uses_rope(layer), model.local_rope(layer)
        bias = weights.get(f"{name}.out.bias")
        self.out = RowParallelLinear(weights[f"{name}.out.weight"], bias, tp, sequence_parallel)
        across = attention_over(options, mesh)
        self.attend = across or WholeRowAttention.apply
        self.own_attention = across is None  # each rank has whole rows
        self.make_projections(name, weights, mesh)
        # whether views of the packed projection are kept for backward, which exchanged heads are not
        by_heads = options.share.context == "ulysses" or mesh.cp_levels is not None
        exchanged = not self.own_attention and by_heads
        self.keeps_projection = self.norms_qk or not exchanged

    def make_projections(self, name: str, weights: Weights, mesh: Mesh) -> None:
        """Create the modules of `project`."""
        tp, bias, model = mesh.tp, weights.get(f"{name}.qkv.bias"), self.model_config
        sequence_parallel = self.options.sequence_parallel
        self.qkv = ColumnParallelLinear(weights[f"{name}.qkv.weight"], bias, tp, sequence_parallel)
        self.q_norm: Any = self._qk_norm(weights, f"{name}.q_norm.weight", mesh)
        self.k_norm: Any = self._qk_norm(weights, f"{name}.k_norm.weight", mesh)
        self.norms_qk = self.q_norm is not None
        self.norms_first = self.norms_qk and not model.qk_norm_after_rope

    def _qk_norm(self, weights: Weights, name: str, mesh: Mesh) -> Norm | None:
        model = self.model_config
        if model.qk_norm == "none":
            return None
        own = model.rms_norm_eps, model.norm_offset
        if model.qk_norm == "head":
            weight = weights.get(name, NO_WEIGHT)  # with `qk_norm_weight: false` no spec has one
            return RMSNorm(weight, *own, model.rounds_normalized, self.options.ops)
        if model.qk_norm == "each_head":
            return EachHeadLayerNorm(weights[name], *own)
        return FullWidthRMSNorm(weights[name], *own, model.rounds_normalized, mesh.tp)

    has_gradient = True  # of `attend` and `project`: not of those of subclasses

    @property
    def differentiates(self) -> bool:
        return self.has_gradient and self.own_attention  # not over parts of rows

    def compute(self, x: Tensor, saved: Saved, state: ForwardState, residual: Tensor | None = None) -> Tensor:
        """Compute the block; each operation leaves in `saved` what its gradient takes from there."""
        # [seq, batch, before_gate], this tp rank's heads
        packed = self.qkv.compute(x, saved)
        out = self._attention(packed, saved, state)  # [seq, batch, heads, value_dim]
        return self.out.compute(out.flatten(-2), saved, residual=residual)

    def _attention(self, packed: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        """Return the output of this rank's heads, from the packed projection."""
        tables = self.rotary_tables(state) or (None, None)
        # Views of `packed`, rotated in place: [seq, batch, heads, head_dim], k and v with kv_heads, v
        # value_dim wide. Before norms that come first they are not rotated yet.
        turn = (None, None) if self.norms_first else tables
        sizes = self.heads, self.kv_heads, self.head_dim
        q, k, v = self.ops.split_rotary(packed, *sizes, *turn, disposable=True, value_dim=self.value_dim)
        if self.norms_qk:
            q, k = self.q_norm.compute(q, saved), self.k_norm.compute(k, saved)
        if self.norms_first and tables[0] is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        q = q if state.query_factors is None else q.mul_(state.query_factors)
        out, kept = forward_keeping(q, k, v, **self.attention_options(state, self.recomputes_scores))
        saved.append((*tables, state.query_factors, *kept))
        return out

    def gradient(self, grad: Tensor, saved: Saved, state: ForwardState) -> Tensor:
        """Return the gradient of x through the block; that of the residual is the caller's."""
        dout = self.out.gradient(grad, saved)  # [seq, batch, heads · value_dim]
        dpacked = self._projection_gradient(dout, saved, state)  # [seq, batch, before_gate]
        return self.qkv.gradient(dpacked, saved)  # [seq (/tp), batch, hidden]

    def _projection_gradient(
        self, dout: Tensor, saved: Saved, state: ForwardState, dgate: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of the packed projection; `dgate` is that of its gate, if it has one.

        What attention has kept is freed on return, before the projection's own backward.
        """
        cos, sin, factors, *kept = saved.pop()
        options = self.attention_options(state, self.recomputes_scores)
        dq, dk, dv = backward_of_kept(dout.unflatten(-1, (self.heads, -1)), tuple(kept), **options)
        dq = dq if factors is None else dq * factors
        if self.norms_first and cos is not None:
            dq, dk = rotate(dq, cos, sin, inverse=True), rotate(dk, cos, sin, inverse=True)
            cos = sin = None  # the rotation is undone
        if self.norms_qk:
            dk = self.k_norm.gradient(dk, saved)  # in the reverse order of `compute`
            dq = self.q_norm.gradient(dq, saved)
        return self.ops.split_rotary_backward(dq, dk, dv, cos, sin, dgate)

    def rotary_tables(self, state: ForwardState) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of the positions of this cp rank, or None if the layer does not rotate.

        Under sequence parallelism they still cover the cp rank's whole part of the sequence.
        """
        if not self.uses_rope:
            return None
        return state.local_rotary if self.local_rope else state.rotary

    def attention_options(self, state: ForwardState, recompute: bool = True) -> dict[str, Any]:
        """Return the keyword arguments of the attention operation.

        Args:
            recompute: True: keep q, k and v, and compute the rest again in a backward, if there is one.
                False: keep the probabilities, too, or what a kernel has in their place.
        """
        model, dropout = self.model_config, None
        if model.attention_dropout and state.training:
            key = state.dropout_key(Site.ATTENTION, self.layer)
            dropout = AttentionDropout(
                key, state.samples, model.attention_dropout, self.first_head, state.first_position
            )
        options = {
            "scale": self.scale,
            "window": self.window,
            "document_start": state.first_visible,
            "softcap": model.attention_softcap,
            "dropout": dropout,
            "boundaries": state.boundaries,
            "recompute": recompute,
        }
        return options if state.part is None else {**options, "part": state.part}


def make(
    model: ModelConfig, block: BlockSpec, weights: Weights, mesh: Mesh, options: LayerOptions
) -> Attention:
    """Return the module of a block, see `BlockKind.make`."""
    if model.attention_gate:
        from megalite.model.blocks.attention.gated import GatedAttention

        return GatedAttention(model, block, weights, mesh, options)
    if model.has_sinks(block.layer):
        from megalite.model.blocks.attention.sinks import SinkAttention

        return SinkAttention(model, block, weights, mesh, options)
    return Attention(model, block, weights, mesh, options)

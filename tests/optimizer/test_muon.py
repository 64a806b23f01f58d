"""Muon on one rank against torch's, the iterations against the singular value decomposition, and the plan of who
orthogonalizes which matrix."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megalite.config.load import from_dict
from megalite.config.sections.lora import PROJECTIONS
from megalite.config.sections.model import ModelConfig
from megalite.config.sections.muon import MuonConfig
from megalite.config.sections.optimizer import OptimizerConfig
from megalite.mesh.layout import AxisPlace, Coordinates, Layout
from megalite.mesh.mesh import Mesh
from megalite.model.parameters import model_specs
from megalite.optimizer.muon.muon import Muon
from megalite.optimizer.muon.newton_schulz import orthogonalized
from megalite.optimizer.muon.ownership import cost, matrix_rounds
from megalite.optimizer.registry import ADAMW, OPTIMIZERS, state_bytes, state_spans
from megalite.optimizer.schedule import learning_rate
from megalite.optimizer.state import OptimizerState
from megalite.parallel.sharding.buckets import bucket_layout
from megalite.parallel.sharding.store import ParameterStore, StoreOptions

OPTIONS = OptimizerConfig(lr=0.02)
MODEL = ModelConfig(  # no width is a multiple of a vector
    vocab_size=40,
    hidden_size=20,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attention_bias=True,
)


HYBRID = replace(
    MODEL,
    num_hidden_layers=3,
    layer_blocks=["delta", "mamba", "convolution"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    mamba_num_heads=4,
    mamba_head_dim=6,
    mamba_state_size=5,
    mamba_n_groups=2,
)
MIXTURE = replace(MODEL, num_experts=3, moe_intermediate_size=12, mlp_only_layers=[0])


def make(
    muon: MuonConfig, dtype: torch.dtype = torch.float32, model: ModelConfig = MODEL
) -> tuple[ParameterStore, Muon]:
    store = ParameterStore(model_specs(model), Mesh(Layout()), StoreOptions(dtype=dtype, bucket_bytes=3e3))
    store.initialize(1)
    return store, Muon(OptimizerState(store, OPTIMIZERS["muon"].tensors()), OPTIONS, muon)


def draw_gradients(store: ParameterStore, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in store.weights.values():
        weight.grad.copy_(torch.randn(weight.tensor.shape, generator=generator))


def matrices(store: ParameterStore) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values and gradients of each matrix: of q, k, v, gate and up apart."""
    pairs = []
    for weight in store.weights.values():
        rows = [segment.shape[0] for segment in weight.spec.segments]
        if "experts.in" in weight.spec.name:
            rows = [12] * 6  # gate and up of each expert
        elif "experts.down" in weight.spec.name:
            rows = [20] * 3
        elif weight.spec.segments[0].role not in PROJECTIONS:
            continue
        if weight.tensor.dim() == 2:
            pairs += zip(weight.tensor.detach().split(rows), weight.grad.split(rows), strict=True)
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nesterov, adjust", [(True, "original"), (False, "match_rms_adamw")])
def test_bits_are_those_of_torch(dtype, nesterov, adjust):
    store, ours = make(
        MuonConfig(nesterov=nesterov, adjust_lr=adjust, momentum=0.9, weight_decay=0.2, ns_steps=4), dtype
    )
    parameters = [value.clone().requires_grad_() for value, _ in matrices(store)]
    theirs = torch.optim.Muon(parameters, 0.02, 0.2, 0.9, nesterov=nesterov, ns_steps=4, adjust_lr_fn=adjust)
    for step in range(1, 5):
        draw_gradients(store, step)
        for parameter, (_, gradient) in zip(parameters, matrices(store), strict=True):
            parameter.grad = gradient.clone() / 2
        ours.step(step, OPTIONS.lr, torch.tensor(2.0))
        theirs.step()
    assert len(parameters) == 14
    assert all(torch.equal(value, parameter) for (value, _), parameter in zip(matrices(store), parameters, strict=True))


def test_every_expert_is_orthogonalised_alone():
    store, ours = make(MuonConfig(), model=MIXTURE)
    parameters = [value.clone().requires_grad_() for value, _ in matrices(store)]
    theirs = torch.optim.Muon(parameters, MuonConfig().lr)
    draw_gradients(store, 1)
    for parameter, (_, gradient) in zip(parameters, matrices(store), strict=True):
        parameter.grad = gradient.clone()
    ours.step(1, OPTIONS.lr, None)
    theirs.step()
    assert len(parameters) == 7 + 4 + 9
    assert all(torch.equal(value, parameter) for (value, _), parameter in zip(matrices(store), parameters, strict=True))


def test_every_part_of_a_mixers_projection_is_orthogonalised_alone():
    store, ours = make(MuonConfig(), model=HYBRID)
    parameters = [value.clone().requires_grad_() for value, _ in matrices(store)]
    theirs = torch.optim.Muon(parameters, MuonConfig().lr)
    draw_gradients(store, 1)
    for parameter, (_, gradient) in zip(parameters, matrices(store), strict=True):
        parameter.grad = gradient.clone()
    ours.step(1, OPTIONS.lr, None)
    theirs.step()
    assert len(parameters) == 7 + 6 + 4
    assert all(torch.equal(value, parameter) for (value, _), parameter in zip(matrices(store), parameters, strict=True))
    others = {
        segment.name.rpartition("mixer.")[2]
        for weight in store.weights.values()
        for segment in weight.spec.segments
        if "mixer." in segment.name and OPTIMIZERS["muon"].kinds(segment) == ADAMW
    }
    convolutions = {f"conv_{part}.weight" for part in "qkvxBC"} | {"conv.weight"}
    assert others == convolutions | {f"conv_{part}.bias" for part in "xBC"} | {"a_log", "dt_bias", "d", "norm.weight"}


def test_a_divisor_that_is_not_a_number_changes_nothing():
    store, optimizer = make(MuonConfig())
    draw_gradients(store, 1)
    optimizer.step(1, OPTIONS.lr, None)
    before = optimizer.state.copy()
    optimizer.step(2, OPTIONS.lr, torch.tensor(torch.nan))
    assert all(torch.equal(one, other) for one, other in zip(before, optimizer.state.changing(), strict=True))
    optimizer.step(2, OPTIONS.lr, torch.tensor(1.0))
    after = optimizer.state.copy()
    optimizer.state.restore(before)
    optimizer.step(2, OPTIONS.lr, None)
    assert all(torch.equal(one, other) for one, other in zip(after, optimizer.state.changing(), strict=True)), (
        "a step undone and repeated"
    )


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_iterations_keep_the_singular_vectors_and_bring_the_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = u.T @ orthogonalized(matrix.clone(), 8) @ v.T
    assert (values - values.diag().diag()).abs().max() < 1e-9
    assert values.diag().min() > 0.65 and values.diag().max() < 1.25


def test_the_rate_of_matrices_has_the_shape_of_the_schedule():
    """With weight decay alone (gradients are zero) the weights shrink by 1 - rate * decay."""
    config = from_dict({"optimizer": {"lr": 1e-3, "warmup_steps": 4}, "train": {"steps": 10}})
    store = ParameterStore(model_specs(MODEL), Mesh(Layout()), StoreOptions(dtype=torch.float64))
    store.initialize(1)
    optimizer = Muon(
        OptimizerState(store, OPTIMIZERS["muon"].tensors()), config.optimizer, MuonConfig(lr=0.5, weight_decay=0.1)
    )
    for step, share in ((1, 0.25), (4, 1.0), (7, 0.5), (10, 0.0)):
        before = [value.clone() for value, _ in matrices(store)]
        optimizer.step(step, learning_rate(config, step), None)
        for (value, _), old in zip(matrices(store), before, strict=True):
            torch.testing.assert_close(value, old * (1 - 0.5 * share * 0.1), rtol=1e-12, atol=0)


LAYOUTS = [
    Layout(),
    Layout(dp=2, dp_shard=1),
    Layout(dp=8),
    Layout(dp=4, cp=2, dp_shard=4),
    Layout(tp=2, dp=3),
    Layout(tp=4, dp=2, dp_shard=1),
    Layout(pp=2, tp=2, dp=2),
]


@pytest.mark.parametrize("bucket_bytes", [1.0, 25e6])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_element_reaches_the_owner_once_and_returns_to_all_that_keep_it(layout, bucket_bytes):
    layouts = bucket_layout(model_specs(MODEL, tp=layout.tp), layout.coordinates(0), layout.owners, bucket_bytes)
    rounds = matrix_rounds(layouts, layout)
    names = [matrix.segment.name for each in rounds for matrix in each]
    assert len(set(names)) == len(names) == 14
    for each in rounds:
        assert [matrix.owner for matrix in each] == sorted({matrix.owner for matrix in each})
        for matrix in each:
            assert sum(part.numel for part in matrix.parts) == matrix.segment.numel
            by_part = [
                sorted(piece[2:] for piece in matrix.gathered if piece.part == part)
                for part in range(len(matrix.parts))
            ]
            for pieces in by_part:
                assert (pieces[0][0], pieces[-1][1]) == (matrix.start, matrix.stop)
                assert all(one[1] == following[0] for one, following in pairwise(pieces))
            kept = {
                rank: [piece for piece in matrix.scattered if piece.rank == rank] for rank in range(layout.stage_ranks)
            }
            assert matrix.owner in [piece.rank for piece in matrix.scattered]
            for rank, pieces in kept.items():
                place = layout.position(rank)
                shard = (place["dp"] * layout.cp + place["cp"]) % layout.shard
                low, high = layouts[matrix.bucket].part(shard, layout.shard)
                wanted = (max(low, matrix.start), min(high, matrix.stop))
                assert [piece[2:] for piece in pieces] == ([wanted] if wanted[0] < wanted[1] else [])
                part = matrix.segment.local(layout.coordinates(rank))
                assert all(matrix.parts[piece.part] == part for piece in pieces)


EXPERT_LAYOUTS = [
    Layout(dp=4, ep=2, experts=True),
    Layout(dp=4, tp=2, ep=4, dp_shard=2, experts=True),
    Layout(dp=2, cp=2, tp=2, ep=2, dp_shard=1, sharded=False, experts=True),
]


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
def test_an_experts_matrices_stay_with_the_ranks_that_hold_it(layout):
    """Every element reaches the owner once, and returns to each replica once."""
    model = replace(MIXTURE, num_experts=4)
    at = Coordinates({"tp": AxisPlace(0, layout.tp), "expert": AxisPlace(0, layout.ep)})
    rounds = matrix_rounds(bucket_layout(model_specs(model, tp=layout.tp), at, layout.owners, 25e6), layout)
    expert_matrices = [matrix for each in rounds for matrix in each if ".experts." in matrix.segment.name]
    names = [matrix.segment.name for matrix in expert_matrices]
    assert len(set(names)) == len(names) == 4 * 3
    for matrix in expert_matrices:
        stored, _, number = matrix.segment.name.partition(", matrix ")
        expert = int(number) // (2 if "experts.in" in stored else 1)
        holders = {rank for rank in range(layout.stage_ranks) if rank % layout.ep == expert // (4 // layout.ep)}
        assert matrix.owner in holders and holders >= {piece.rank for piece in (*matrix.gathered, *matrix.scattered)}
        sent = sorted(piece[2:] for piece in matrix.gathered)
        assert (sent[0][0], sent[-1][1]) == (
            matrix.start,
            matrix.stop,
        ) and matrix.stop - matrix.start == matrix.segment.numel
        assert all(one[1] == following[0] for one, following in pairwise(sent))
        kept = sum(piece.stop - piece.start for piece in matrix.scattered)
        assert kept == matrix.segment.numel * layout.expert_data // layout.expert_shard


def test_replicas_share_the_work_evenly():
    """Each rank has every matrix: the longest processing time first is at most 4/3 of the best division (Graham
    1969)."""
    model = replace(MODEL, num_hidden_layers=12)
    layout = Layout(dp=4, dp_shard=1)
    rounds = matrix_rounds(bucket_layout(model_specs(model), layout.coordinates(0), layout.owners, 25e6), layout)
    loads = [
        sum(cost(matrix.segment) for each in rounds for matrix in each if matrix.owner == rank) for rank in range(4)
    ]
    assert max(loads) <= 4 / 3 * sum(loads) / 4


def test_spans_of_state_cover_a_bucket_once():
    for bucket in bucket_layout(model_specs(MODEL), Layout().coordinates(0), {"dense": 3}, 25e6):
        for index in range(3):
            start, stop = bucket.part(index, 3)
            spans = list(state_spans(bucket, start, stop, OPTIMIZERS["muon"].tensors()))
            assert (spans[0].start, spans[-1].stop) == (start, stop)
            assert all(
                one.stop == other.start and (one.decays, one.kinds) != (other.decays, other.kinds)
                for one, other in pairwise(spans)
            )
            assert state_bytes(bucket, start, stop, OPTIMIZERS["adamw"].tensors(), 4) == 8 * (stop - start)

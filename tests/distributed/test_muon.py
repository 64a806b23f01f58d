"""Muon over shards: each matrix is orthogonalised whole, so no way of sharding it changes a bit of an update."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.load import from_dict
from megalite.config.sections.lora import PROJECTIONS
from megalite.mesh.layout import Layout
from megalite.model.parameters import model_specs
from megalite.parallel.sharding.buckets import bucket_layout
from megalite.planner.cost.muon_exchange import exchange
from tests.support import jobs, jobs_muon, jobs_training
from tests.support.configs import case_of, config_of, config_of_one_process, write_tokens
from tests.support.jobs_muon import MODEL, MUON, OPTIONS, STEPS, gradients
from tests.support.spaces.layouts import Case, world

KINDS = ("weight", "momentum_buffer", "exp_avg", "exp_avg_sq")
SMALL, LARGE = 8e3, 25e6  # bytes: a bucket for each layer, one for all
SHARDED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, layout, store
    "one rank": (1, {}, {}),
    "replicas": (2, {"dp": 2, "dp_shard": 1}, {"zero": 0, "bucket_bytes": SMALL}),
    "ZeRO-1": (2, {"dp": 2}, {"zero": 1}),
    "ZeRO-2, small buckets": (2, {"dp": 2}, {"zero": 2, "bucket_bytes": SMALL}),
    "ZeRO-3, four shards": (4, {"dp": 4}, {"zero": 3, "bucket_bytes": SMALL}),
    "two groups of shards": (4, {"dp": 4, "dp_shard": 2}, {"zero": 1}),
    "tensor parallel": (4, {"tp": 2, "dp": 2}, {"zero": 1}),
    "replicated key-value heads": (4, {"tp": 4}, {"zero": 0}),
}


@pytest.fixture(scope="module")
def peer() -> dict[str, Tensor]:
    """torch's Muon and AdamW on whole parameters, with the same gradients, from the weights that one rank
    initialises."""
    from megalite.mesh.mesh import Mesh
    from megalite.parallel.sharding.store import ParameterStore

    store = ParameterStore(model_specs(MODEL), Mesh(Layout()))
    store.initialize(jobs_muon.SEED)
    segments = {segment.name: segment for spec in model_specs(MODEL) for segment in spec.segments}
    parameters = {each.name.removeprefix("weight/"): each.tensor.clone() for each in store.to_load()}
    matrices = [value for name, value in parameters.items() if value.dim() == 2 and segments[name].role in PROJECTIONS]
    rest = [value for name, value in parameters.items() if not any(value is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=MUON.lr)
    groups = [
        {"params": [value for value in rest if (value.dim() > 1) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIONS.lr, betas=(0.9, 0.95), fused=True)
    for step in range(1, STEPS + 1):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient
        muon.step()
        adamw.step()
    moments = {
        f"momentum_buffer/{name}": muon.state[value]["momentum_buffer"]
        for name, value in parameters.items()
        if value in muon.state
    }
    return {f"weight/{name}": value for name, value in parameters.items()} | moments


@pytest.mark.parametrize("sharding", SHARDED)
def test_is_bitwise_torchs_for_equal_gradients(sharding, ranks, peer):
    """Every element that any rank keeps, replicas included: weights, and the one moment of each matrix."""
    size, layout, options = SHARDED[sharding]
    seen = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in peer.items()}
    results = ranks.run(size, jobs_muon.stepped, layout, options)
    for rank, (states, _, _) in enumerate(results):
        for name, place, values in states:
            if name in peer:
                assert torch.equal(values, peer[name][place]), f"{name} on rank {rank}"
                seen[name][place] = True
            else:
                assert name.startswith("exp_avg"), name
    assert all(each.all() for each in seen.values()), "some elements are kept nowhere"
    assert len({count for _, count, _ in results}) == 1, "every rank takes part in every exchange"
    assert max(sent for _, _, sent in results) * 2 == planned_bytes(layout, options) * STEPS


def planned_bytes(layout: dict[str, Any], options: dict[str, Any]) -> int:
    """What the planner says that the rank sends in a step which sends most."""
    dims = Layout(**layout)
    parallel = {
        "tp": dims.tp,
        "dp": dims.dp,
        "dp_shard": dims.dp_shard,
        "zero": options.get("zero", 0) or int(dims.shard > 1),
    }
    config = from_dict({"parallel": parallel, "optimizer": {"name": "muon"}})
    specs = model_specs(MODEL, tp=dims.tp)
    return exchange(
        config, bucket_layout(specs, dims.coordinates(0), dims.owners, options.get("bucket_bytes", LARGE))
    ).sent


MODEL_CASE: Case = case_of(tied=True, kv_heads=2, vocab_size=101, layers=4, masked=True, dropout=0.1, precision="fp64")
LAYOUTS: dict[str, Case] = {
    "tp 2, pp 2, dp 2": {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "sequence_parallel": True, "zero": 1},
    "dp 3, ZeRO-3": {"dp": 3, "microbatches": 2, "zero": 3},
    "zb-v on pp 2, dp 2, ZeRO-2": {"pp": 2, "dp": 2, "microbatches": 4, "schedule": "zb-v", "zero": 2},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL_CASE["vocab_size"])


def with_muon(config: dict[str, Any], **muon: Any) -> dict[str, Any]:
    config["optimizer"] |= {"name": "muon"}
    config["muon"] = {"lr": 0.01, "ns_dtype": "compute", **muon}
    return config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_like_one_process(layout, ranks, references, prefix):
    case = {**MODEL_CASE, **LAYOUTS[layout]}
    got = ranks.run(world(case), jobs.train, with_muon(config_of(case, prefix, "fp64")), 2, KINDS)
    alone = references.run(jobs.train, with_muon(config_of_one_process(case, prefix)), 2, KINDS)
    assert all(rank["losses"] == pytest.approx(alone["losses"], rel=1e-9, abs=0) for rank in got)
    assert all(rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-9, abs=0) for rank in got)
    assert got[0]["tensors"].keys() == alone["tensors"].keys()
    for name, value in got[0]["tensors"].items():
        assert (value - alone["tensors"][name]).abs().max() <= 1e-9, name


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    "precision, parallel, stages",
    [
        ("fp32", {"reduce_dtype": "bf16"}, (1, 3)),
        ("fp32", {"powersgd_rank": 2}, (0, 1)),
        ("fp16", {}, (0, 2)),
        ("bf16", {}, (1, 3)),
    ],
    ids=["bf16 reduction", "PowerSGD", "fp16", "bf16"],
)
def test_compressed_and_narrow_runs_are_the_same_under_every_zero_stage(precision, parallel, stages, ranks, prefix):
    """One microbatch, so that no stage adds in another order. fp16 starts with a scale that overflows: its first steps
    are skipped."""
    runs = []
    for zero in stages:
        config = with_muon(
            config_of({**MODEL_CASE, "dp": 2, "zero": zero, "dropout": 0.0}, prefix, precision), ns_dtype="bf16"
        )
        config["parallel"] |= parallel
        config["fp16"] = {"initial_scale_power": 26, "hysteresis": 1}
        runs.append(ranks.run(2, jobs.train, config, 4, KINDS)[0])
    assert isfinite(runs[0]["grad_norms"][0]) is (precision != "fp16"), "the first scale overflows"
    assert runs[0]["losses"] == runs[1]["losses"]
    assert same(runs[0]["tensors"], runs[1]["tensors"])


def test_an_optimistic_step_that_is_undone_is_bitwise_one_that_waits(ranks, prefix):
    """The norm of some steps clips, so that ranks restore their moments and step again, all ranks of a stage
    together."""
    case = {**MODEL_CASE, "pp": 2, "dp": 2, "microbatches": 4, "zero": 1, "schedule": "zb-v"}
    results = {}
    for optimistic in (True, False):
        config = with_muon(config_of(case, prefix, "fp32"), ns_dtype="bf16")
        config["parallel"] |= {"optimistic_step": optimistic}
        results[optimistic] = ranks.run(4, jobs_muon.undone, config, 6)
    assert results[True][0]["restored"] > 0 and results[False][0]["restored"] == 0
    assert same(results[True][0]["tensors"], results[False][0]["tensors"])


def test_a_checkpoint_holds_one_moment_of_a_matrix_and_resumes_on_another_layout(ranks, prefix):
    case = {**MODEL_CASE, "tp": 2, "dp": 2, "zero": 2, "microbatches": 1}
    config = with_muon(config_of(case, prefix, "fp64", run={"name": "muon"}))
    saved = ranks.run(4, jobs_training.train_and_save, config, 2, 2, KINDS)[0]
    kinds: dict[str, set[str]] = {}
    for name in saved["tensors"]:
        kind, _, tensor = name.partition("/")
        kinds.setdefault(tensor, set()).add(kind)
    adamw = {"weight", "exp_avg", "exp_avg_sq"}
    for tensor, stored in kinds.items():
        matrix = tensor.startswith("layers.") and "norm" not in tensor and tensor.endswith("weight")
        assert stored == ({"weight", "momentum_buffer"} if matrix else adamw), tensor
    other = with_muon(config_of({**MODEL_CASE, "dp": 2, "pp": 2, "zero": 1, "microbatches": 2}, prefix, "fp64"))
    other["train"]["global_batch_size"] = config["train"]["global_batch_size"]
    other["train"]["micro_batch_size"] = config["train"]["global_batch_size"] // 2
    other["checkpoint"] = {"load": saved["directory"]}
    resumed = ranks.run(4, jobs_training.resume, other, 2, KINDS)[0]
    assert resumed["losses"] == pytest.approx(saved["losses"][2:], rel=1e-9, abs=0)
    for name, value in resumed["tensors"].items():
        assert (value - saved["tensors"][name]).abs().max() <= 1e-9, name
    other["optimizer"]["name"] = "adamw"
    message = ranks.run(4, jobs_training.refusal, other)[0]
    assert message.startswith("optimizer.name=adamw does not match checkpoint.load=") and "state of muon" in message

"""Training with fp8 matmuls in every layout as on one process.

fp64 around the products of quantized operands, within 1e-9: layouts must not change a code. A scale that was wrong in
one layout would show at once, since an operand has an error of 2 %.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from megalite_kernels.fp8 import quantize

from megalite.parallel.collectives import all_gather
from tests.distributed.test_equivalence import assert_same_run
from tests.support import jobs
from tests.support.configs import SINGLE, case_of, config_of, config_of_one_process, with_fewer_rows, write_tokens
from tests.support.jobs import make_trainer

BASE = case_of(tied=False, kv_heads=4, vocab_size=96, layers=4, masked=True, dropout=0.0, precision="fp64") | {
    "microbatches": 4
}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "initializer_range": 0.1}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
}
MECHANISMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block": ({}, {"fp8": "block"}),
    "powers of two, inner layers": ({}, {"fp8": "block", "fp8_power_of_two": True, "fp8_first_last": 1}),
    "mxfp8": ({}, {"fp8": "mxfp8"}),
    "experts": (EXPERTS, {"fp8": "block"}),
    "latents": (
        {
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
        {"fp8": "block"},
    ),
}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("block", {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1"}),
    ("block", {"dp": 3, "zero": 3, "recompute": "full", "microbatches": 2}),  # shards cut blocks in three
    ("block", {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 3, "kv_heads": 1}),
    ("block", {"cp": 2, "context": "ring", "dp": 2, "zero": 1}),
    ("powers of two, inner layers", {"pp": 2, "dp": 2, "zero": 3, "schedule": "zb-h2", "recompute": "mlp_in"}),
    ("mxfp8", {"tp": 2, "sequence_parallel": True, "dp": 2, "zero": 3}),
    ("experts", {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "zero": 3}),
    ("experts", {"dp": 4, "ep": 4, "zero": 3, "microbatches": 2}),  # one expert on each rank, not sharded
    ("latents", {"tp": 2, "cp": 2, "context": "gather", "zero": 3}),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configs(prefix: str, mechanism: str, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    case, (model, train) = {**BASE, **layout}, MECHANISMS[mechanism]
    several, one = config_of(case, prefix, "fp64", model={**SIZES, **model}), config_of_one_process(case, prefix)
    one["model"] |= {**SIZES, **model}
    several["parallel"]["ep"] = layout.get("ep", 1)
    for config in (several, one):
        config["train"] |= train
    return several, one


def small_configs(prefix: str, mechanism: str, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same with fewer rows."""
    several, one = configs(prefix, mechanism, **layout)
    with_fewer_rows(several, one)
    return several, one


@pytest.mark.parametrize("mechanism, layout", LAYOUTS, ids=str)
def test_trains_like_one_process(mechanism, layout, ranks, references, prefix):
    several, one = small_configs(prefix, mechanism, **layout)
    world = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    assert_same_run(ranks.run(world, jobs.train, several, 2), references.run(jobs.train, one, 2), 1e-9, 1e-9)


# Codes of a weight gradient depend on the rows of a microbatch: the same number of them on one process.
WEIGHT_GRADIENTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1"}),
    ({}, {"cp": 2, "context": "ring", "recompute": "full"}),
    (EXPERTS, {"dp": 2, "ep": 4, "tp": 2, "sequence_parallel": True}),  # two ranks share a microbatch
    (EXPERTS, {"dp": 2, "ep": 2, "expert_dispatch": "all_gather"}),
]


@pytest.mark.parametrize("model, layout", WEIGHT_GRADIENTS, ids=str)
def test_weight_gradients_of_codes_are_those_of_one_process(model, layout, ranks, references, prefix):
    case = {**BASE, "layers": 2, "microbatches": 2 // layout.get("dp", 1), **layout}
    changes: dict[str, dict[str, Any]] = {
        "model": {**SIZES, **model, "max_position_embeddings": 128},
        "data": {"sequence_length": 128},
        "train": {"fp8": "block", "fp8_weight_gradients": True, "global_batch_size": 8, "micro_batch_size": 4},
    }
    several, one = (config_of(each, prefix, "fp64", **changes) for each in (case, {**case, **SINGLE}))
    several["parallel"] |= {key: layout[key] for key in ("ep", "expert_dispatch") if key in layout}
    world = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    assert_same_run(ranks.run(world, jobs.train, several, 2), references.run(jobs.train, one, 2), 1e-9, 1e-9)


def test_adapters_of_an_fp8_base_train_like_those_of_one_process(ranks, references, prefix):
    several, one = small_configs(prefix, "block", tp=2, sequence_parallel=True, dp=2, zero=3)
    for config in (several, one):
        config["lora"] = {"rank": 2, "alpha": 8.0}
    assert_same_run(ranks.run(4, jobs.train, several, 2), references.run(jobs.train, one, 2), 1e-9, 1e-9)


def gathered_codes(context: Any, config: dict[str, Any]) -> dict[str, int]:
    """The number of matrices that are gathered as codes, and of those whose codes and scales are not those of the
    whole matrix, after a step and after a load."""
    trainer = make_trainer(context, config)
    store, power_of_two = trainer.store, trainer.config.train.fp8_power_of_two
    counts = Counter[str]()

    def check(when: str) -> None:
        for number, bucket in enumerate(store.buckets):
            if bucket.codes is None:
                continue
            store.gatherer.begin_run(planned=False)
            store.gatherer.gather(number, None)
            bucket.await_weights()
            weights = all_gather(bucket.owned_weights, bucket.domain.shard).wait()
            for index, slot in enumerate(bucket.layout.slots):
                own = bucket.codes.matrix(index)
                whole = quantize(weights[slot.start : slot.stop].view(slot.shape), (128, 128), power_of_two)
                same = torch.equal(own.codes.view(torch.uint8), whole.codes.view(torch.uint8))
                same = same and torch.equal(own.scales, whole.scales)
                counts.update(matrices=1, **{when: not same, "zero": not own.codes.view(torch.uint8).any()})

    trainer.step()
    check("after a step")
    for bucket in store.buckets:
        bucket.master.mul_(1.5)
    store.publish()
    check("after a load")
    trainer.close()
    return dict(counts)


@pytest.mark.parametrize("lora", [{}, {"rank": 2}], ids=["trained", "frozen"])
def test_codes_of_shards_are_those_of_whole_matrices(lora, ranks, prefix):
    """Shards of three ranks cut rows and blocks, in bf16 with powers of two and without."""
    several, _ = configs(prefix, "block", dp=3, zero=3, microbatches=1)
    several["train"] |= {"precision": "bf16", "fp8_power_of_two": bool(lora)}
    several["lora"] = lora
    matrices = 2 * 4 * BASE["layers"]  # qkv, out, in and down, twice
    for counts in ranks.run(3, gathered_codes, several):
        assert counts == {"matrices": matrices, "after a step": 0, "after a load": 0, "zero": 0}


def test_operands_are_rounded(references, prefix):
    """Otherwise the tests above would prove nothing."""
    _, one = small_configs(prefix, "block")
    plain = {**one, "train": {**one["train"], "fp8": "none"}}
    more = {**one, "train": {**one["train"], "fp8_weight_gradients": True}}
    losses = [references.run(jobs.train, config, 2)["losses"] for config in (plain, one, more)]
    assert losses[0] != losses[1] and losses[1] != losses[2]


def judged(context: Any, config: dict[str, Any], matrix: str, operand: str) -> list[str | None]:
    """Train three steps, in the second of which an element of an operand is infinite. Return why steps were skipped.

    If it is dy, x is infinite in a validation before, which the step must not be blamed for.
    """
    trainer = make_trainer(context, config)
    try:
        faults = [trainer.step().fault]
        trainer.drain()
        weight = trainer.store.weights.get(matrix)
        if operand == "dy":
            if weight is not None:
                weight.matmuls.forward = with_infinite_element(weight.matmuls.forward)
            assert not math.isfinite(trainer.evaluate())
            if weight is not None:
                del weight.matmuls.forward
        if weight is not None:
            name = {"x": "forward", "dy": "input_gradient"}.get(operand)
            if name is None:
                weight.tensor.detach()[3, 5] = math.inf
            else:
                setattr(weight.matmuls, name, with_infinite_element(getattr(weight.matmuls, name)))
        faults.append(trainer.step().fault)
        if weight is not None:
            for name in ("forward", "input_gradient"):
                vars(weight.matmuls).pop(name, None)
        return [*faults, trainer.step().fault if operand != "w" else None]
    finally:
        trainer.close()


def with_infinite_element(multiply: Any) -> Any:
    def changed(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        rows = rows.clone()
        rows.view(-1)[7] = math.inf
        return multiply(rows, *others)

    return changed


@pytest.mark.parametrize(
    "mechanism, matrix, operand",
    [
        ("block", "layers.2.mlp.down.weight", "x"),
        ("block", "layers.1.attention.qkv.weight", "w"),
        ("mxfp8", "layers.1.mlp.in.weight", "dy"),
    ],
)
def test_the_operand_that_is_not_finite_is_named(mechanism, matrix, operand, ranks, prefix):
    several, _ = small_configs(prefix, mechanism, pp=2)
    several["data"] = {**several["data"], "validation": 0.1}
    for first, second, third in ranks.run(2, judged, several, matrix, operand):
        assert first is third is None
        cause = "the gradients are" if operand == "dy" else "the loss is"
        assert second == f"{cause} not finite, beginning with {operand} of {matrix} (samples 8 to 15)"

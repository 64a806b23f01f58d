"""PowerSGD with experts: each expert's matrices against a float64 reference; training, memory and checkpoints under
expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.mesh.layout import Coordinates
from megalite.parallel.spec import ParamSpec, Segment
from tests.distributed.test_powersgd import Reference, memory_of
from tests.support import jobs, jobs_reduction
from tests.support.configs import write_tokens
from tests.support.jobs_experts import configs
from tests.support.jobs_reduction import SPECS, random_gradients, reduced, whole

EXPERTS, ROWS, COLUMNS, RANK = 4, 24, 32, 2
STACK = Segment("experts", (EXPERTS * 2 * ROWS, COLUMNS), 0, axis="expert", experts=EXPERTS, fused=2)
WITH_EXPERTS = (ParamSpec("experts", 0, (STACK,), domain="expert"), *SPECS)
STEPS = 4
HALF = 2  # steps before a checkpoint


def matrices(stack: Tensor) -> Tensor:
    """[…, rows, columns] → […, matrices, ROWS, COLUMNS]."""
    return stack.unflatten(-2, (-1, ROWS))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("ep", [1, 2])
def test_each_expert_is_the_reference_step_by_step(zero, ep, ranks):
    """Of four ranks, 4 / ep hold an expert. A matrix without gradients in the first step, and a step that is thrown
    away."""
    at, skipped = Coordinates.on("expert", 0, ep), (2,)
    steps = [random_gradients(4, seed=seed, dtype=torch.float64, specs=WITH_EXPERTS, at=at) for seed in range(STEPS)]
    matrices(steps[0]["experts"])[:, :, 1] = 0.0
    options = {"zero": zero, "rank": RANK, "skipped": skipped, "specs": WITH_EXPERTS, "ep": ep}
    got = ranks.run(4, reduced, steps, options)
    each = 2 * EXPERTS // ep  # matrices of a rank
    holders = [range(number // each, 4, ep) for number in range(2 * EXPERTS)]
    references = [Reference("experts", (ROWS, COLUMNS), 4 // ep, RANK, number) for number in range(2 * EXPERTS)]
    for step, gradients in enumerate(steps):
        by_expert = matrices(whole(got, step, WITH_EXPERTS)["experts"])
        for number, reference in enumerate(references):
            given = torch.stack([matrices(gradients["experts"][rank, 0])[number % each] for rank in holders[number]])
            expected = reference.step(given, step not in skipped)
            assert (by_expert[number] - expected).abs().max() <= 1e-11 * max(given.sum(0).norm(), 1.0), (step, number)
            assert not given.any() or (expected - given.sum(0)).norm() > 0.1 * given.sum(0).norm(), (
                "it is an approximation"
            )


def test_experts_of_one_rank_are_not_compressed(ranks):
    at = Coordinates.on("expert", 0, 4)
    gradients = random_gradients(4, dtype=torch.float64, specs=WITH_EXPERTS, at=at)
    got = ranks.run(4, reduced, [gradients], {"rank": RANK, "specs": WITH_EXPERTS, "ep": 4})
    assert torch.equal(whole(got, 0, WITH_EXPERTS)["experts"], gradients["experts"][:, 0].flatten(0, 1))


# ---- training


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configuration(prefix: str, rank: int | None = RANK, **layout: Any) -> dict[str, Any]:
    config, _ = configs(prefix, **{"dp": 4, "microbatches": 1, **layout})
    config["parallel"]["powersgd_rank"] = rank
    config["train"]["steps"] = 2 * HALF
    return config


def test_no_layout_of_experts_changes_the_training(ranks, prefix):
    """What is sent, and what is owed, are sums over all ranks: only rounding differs. But without compression all is
    different."""
    results = {
        ep: ranks.run(4, jobs.train, configuration(prefix, ep=ep, zero=zero), 2 * HALF)[0]
        for ep, zero in ((1, 0), (2, 1))
    }
    for name in ("losses", "grad_norms"):
        assert results[2][name] == pytest.approx(results[1][name], rel=1e-9, abs=0)
    for name, value in results[1]["tensors"].items():
        assert name.startswith("powersgd_") or (results[2]["tensors"][name] - value).abs().max() <= 1e-9, name
    plain = ranks.run(4, jobs.train, configuration(prefix, rank=None, ep=2, zero=1), 2 * HALF)[0]
    assert plain["losses"] != pytest.approx(results[1]["losses"], rel=1e-6)


def test_their_memory_is_reported(ranks, prefix):
    """Of a rank's two experts of each of three layers: an error for every element, and three factors."""
    (measured, expected, _), *_ = ranks.run(4, memory_of, configuration(prefix, ep=2, zero=1))
    (_, without, _), *_ = ranks.run(4, memory_of, configuration(prefix, ep=4, zero=1))
    experts = 3 * 2 * (2 * (24 * 32 + 32 * RANK) + 32 * 24 + 24 * RANK)
    assert measured == expected and expected.powersgd - without.powersgd == 8 * experts


def test_a_resume_keeps_what_experts_are_owed(ranks, prefix, tmp_path):
    """Bitwise where the layout is the same; with other holders of an expert, they share the sum of the errors."""
    config = configuration(prefix, ep=2, zero=1)
    config["run"]["dir"] = str(tmp_path)
    before = ranks.run(4, jobs_reduction.train_and_save, config, HALF, HALF)
    again = configuration(prefix, ep=2, zero=1)
    again["checkpoint"] = {"load": before[0]["directory"]}
    for got, straight in zip(ranks.run(4, jobs_reduction.resume, again, HALF), before, strict=True):
        assert got["losses"] == straight["losses"][HALF:] and got["notes"] == []
        assert all(
            torch.equal(value, straight["errors"][name]) and value.any() for name, value in got["errors"].items()
        )
    other = configuration(prefix, ep=1, zero=1)
    other["checkpoint"] = {"load": before[0]["directory"]}
    got = ranks.run(4, jobs_reduction.resume, other, 1)
    note = (
        "parallel.ep changed from 2 to 1: PowerSGD's error feedback is divided equally among the current ranks; the "
        "resumed run will not be bitwise identical"
    )
    assert got[0]["notes"] == [note]
    name = "layers.0.mlp.experts.in.weight"
    owed = torch.cat([before[rank]["errors"][name] + before[rank + 2]["errors"][name] for rank in (0, 1)])
    assert all((4 * rank["errors"][name] - owed).abs().max() <= 1e-12 * owed.abs().max() for rank in got)

"""PowerSGD: the algorithm on given gradients against a float64 reference, then training, memory and checkpoints."""

from __future__ import annotations

import re
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.system.rng import key
from megalite.training.memory_report import ModelStates, formula, measured, report
from tests.support import jobs, jobs_reduction
from tests.support.configs import case_of, config_of, write_tokens
from tests.support.jobs import make_trainer
from tests.support.jobs_reduction import SEED, SPECS, Gradients, random_gradients, reduced, segments, whole
from tests.support.spaces.layouts import Case

STEPS = 5


class Reference:
    """One matrix in float64, from the gradients of all ranks ([dp, n, m]). Its bases come from an SVD: any of the same
    space will do."""

    def __init__(self, name: str, shape: tuple[int, ...], dp: int, rank: int, *numbers: int):
        generator = torch.Generator().manual_seed(key(SEED, name, "powersgd", *numbers))
        self.factor = torch.randn((shape[1], rank), generator=generator).double()
        self.errors = torch.zeros(dp, *shape, dtype=torch.float64)

    def step(self, gradients: Tensor, applied: bool = True) -> Tensor:
        owed = gradients.double() + self.errors
        total = owed.sum(0)
        basis = torch.linalg.svd(total @ self.factor, full_matrices=False).U
        approximation = basis @ (basis.T @ total)
        if applied:
            self.factor, self.errors = total.T @ basis, owed - approximation / len(owed)
        return approximation


def is_compressed(value: Tensor, rank: int) -> bool:
    """[dp, 1, n, m]: whether factors of that rank are smaller."""
    return value.dim() == 4 and sum(value.shape[2:]) * rank < value.shape[2] * value.shape[3]


def references(gradients: Gradients, rank: int) -> dict[str, Reference]:
    parts = segments(gradients).items()
    return {
        name: Reference(name, value.shape[2:], len(value), rank) for name, value in parts if is_compressed(value, rank)
    }


CASES = {
    "rank 1": (3, 1, torch.float64, 1e-11),
    "rank 2": (3, 2, torch.float64, 1e-11),
    "rank 3": (2, 3, torch.float64, 1e-11),
    "rank 4": (4, 4, torch.float64, 1e-11),
    "rank 2, fp32": (4, 2, torch.float32, 2e-4),
}


@pytest.mark.parametrize(("case", "zero"), zip(CASES, cycle((0, 1))))
def test_is_the_reference_step_by_step(zero, case, ranks):
    """With a step that is thrown away, and a loss scale that changes: neither may be seen in what follows."""
    dp, rank, dtype, tolerance = CASES[case]
    steps = [random_gradients(dp, seed=seed, dtype=dtype) for seed in range(STEPS)]
    scales, skipped = [1.0, 256.0, 2.0, 2.0, 64.0], (2,)
    got = ranks.run(dp, reduced, steps, {"zero": zero, "rank": rank, "scales": scales, "skipped": skipped})
    reference = references(steps[0], rank)
    assert set(reference) == {"fused.a", "fused.b", "matrix"}
    for step, gradients in enumerate(steps):
        reduced_gradients = whole(got, step)
        for name, value in segments(gradients).items():
            plain = value[:, 0].double().sum(0)
            expected = reference[name].step(value[:, 0], step not in skipped) if name in reference else plain
            size = plain.norm() if name in reference else plain.abs().max()
            assert (reduced_gradients[name] / scales[step] - expected).abs().max() <= tolerance * size, (step, name)
            assert name not in reference or (expected - plain).norm() > 0.1 * plain.norm(), "it is an approximation"


def test_nothing_is_lost(ranks):
    """What has been sent, and what is still owed, add up to all gradients. A first step of zeros leaves no direction to
    continue with."""
    gradients = random_gradients(2, dtype=torch.float64)
    nothing = {name: torch.zeros_like(value) for name, value in gradients.items()}
    got = ranks.run(2, reduced, [nothing, *[gradients] * 4, *[nothing] * 40], {"rank": 2})
    sent = [whole(got, step)["matrix"] for step in range(45)]
    wanted = 4 * gradients["matrix"][:, 0].sum(0)
    assert not sent[0].any() and all(value.any() for value in sent[2:])
    distance = [(wanted - sum(sent[:step])).norm() / wanted.norm() for step in (5, 15, 45)]
    assert distance[0] > 0.5 and distance[0] > 1.2 * distance[1] and distance[2] < 1e-9


def test_low_rank_gradients_arrive_whole(ranks):
    """A sum over ranks of no higher rank than the factors is not an approximation."""
    # [3, 1, 60, 1]: one direction from each rank
    left = random_gradients(3, dtype=torch.float64)["matrix"][:, :, :, :1]
    right = random_gradients(3, seed=1, dtype=torch.float64)["matrix"][:, :, :1]
    gradients = {**random_gradients(3, dtype=torch.float64), "matrix": left @ right}
    got = ranks.run(3, reduced, [gradients], {"rank": 3})
    wanted = gradients["matrix"].sum((0, 1))
    assert (whole(got, 0)["matrix"] - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("zero", [0, 1])
def test_matrices_that_would_gain_nothing_are_reduced_as_they_are(zero, ranks):
    steps = [random_gradients(3, seed=seed) for seed in range(2)]
    got, plain = (ranks.run(3, reduced, steps, {"zero": zero, "rank": rank}) for rank in (60, None))
    assert got[0]["bytes"] == plain[0]["bytes"]
    assert all(torch.equal(value, whole(plain, 1)[name]) for name, value in whole(got, 1).items())


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_an_overflow_is_forgotten_with_its_step(broken, ranks):
    """One rank's gradient is not finite: every rank sees that in the sum, and what is owed is what was owed before."""
    steps = [random_gradients(2, seed=seed) for seed in range(3)]
    bad = {name: value.clone() for name, value in steps[0].items()}
    bad["matrix"][1, 0, 7, 11] = broken
    with_bad = ranks.run(2, reduced, [steps[0], bad, *steps[1:]], {"rank": 2, "skipped": (1,)})
    without = ranks.run(2, reduced, steps, {"rank": 2})
    for rank in with_bad:
        assert not any(value.isfinite().any() for _, value in rank["steps"][1]["matrix"])
    for step in (1, 2):
        assert all(torch.equal(value, whole(without, step)[name]) for name, value in whole(with_bad, step + 1).items())


@pytest.mark.parametrize("zero", [0, 1])
def test_few_bytes_travel(zero, ranks):
    """Rank by rank: two factors of a matrix and the rest, padding included, whole to each of the three others (they are
    small)."""
    rank, got = 2, ranks.run(4, reduced, [random_gradients(4)], {"zero": zero, "rank": 2, "bucket_bytes": 1e9})
    plain = ranks.run(4, reduced, [random_gradients(4)], {"zero": zero, "bucket_bytes": 1e9})
    shapes = [segment.shape for spec in SPECS for segment in spec.segments]
    factors = sum(sum(shape) * rank for shape in shapes if len(shape) == 2 and sum(shape) * rank < shape[0] * shape[1])
    assert 4 * 3 * (factors + 40 + 4) <= got[0]["bytes"] <= 4 * 3 * (factors + 40 + 4 + 4 * 32 + 256)
    assert got[0]["bytes"] < (0.15 if zero == 0 else 0.6) * plain[0]["bytes"]


# ---- training

MODEL: Case = case_of(tied=False, kv_heads=2, vocab_size=101, layers=4, masked=False, dropout=0.0, microbatches=2)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def configuration(prefix: str, case: Case, rank: int | None, steps: int = 20, **checkpoint: Any) -> dict[str, Any]:
    config = config_of({**MODEL, **case}, prefix, case.get("precision", "fp32"))
    config["parallel"]["powersgd_rank"] = rank
    config["train"]["steps"] = steps
    config["checkpoint"] |= checkpoint
    return config


def world(case: Case) -> int:
    return case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)


LAYOUTS: dict[str, Case] = {
    "dp 3, ZeRO-0, bf16": {"dp": 3, "zero": 0, "precision": "bf16"},
    "tp 2, dp 2, tied": {"tp": 2, "dp": 2, "zero": 1, "tied": True, "sequence_parallel": True, "kv_heads": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_ends_within_one_percent(layout, ranks, prefix):
    case, steps, losses = LAYOUTS[layout], 30, {}
    for rank in (4, None):
        config = configuration(prefix, case, rank, steps)
        config["optimizer"]["lr"] = 3e-3
        got = ranks.run(world(case), jobs.train, config, steps)
        assert all(each["losses"] == got[0]["losses"] and each["grad_norms"] == got[0]["grad_norms"] for each in got)
        losses[rank] = got[0]["losses"]
    assert losses[None][-1] < losses[None][0] - 0.5, "there is something to learn"
    assert sum(losses[4][-5:]) == pytest.approx(sum(losses[None][-5:]), rel=0.01)
    assert losses[4] != losses[None]


def owed_in_fp16(context: Any, config: dict[str, Any], steps: int) -> list[tuple[bool, float]]:
    """After each step: whether it was skipped, and the norm of this rank's errors."""
    trainer = make_trainer(context, config)
    errors = []
    for _ in range(steps):
        skipped = trainer.step().skipped
        errors.append(
            (skipped, torch.cat([error.flatten() for error in jobs_reduction.errors(trainer).values()]).norm().item())
        )
    trainer.close()
    return errors


def test_what_is_owed_has_no_loss_scale_and_outlives_overflows(ranks, prefix):
    results = {}
    for power in (8, 12, 26):
        config = configuration(prefix, {"dp": 2, "zero": 1, "precision": "fp16"}, 2)
        config["fp16"] = {"initial_scale_power": power, "hysteresis": 1}
        results[power] = ranks.run(2, owed_in_fp16, config, 4 if power < 26 else 14)[0]
    low, high = ([norm for _, norm in results[power]] for power in (8, 12))
    assert low == pytest.approx(high, rel=0.02) and low[-1] > low[0] > 0
    before, steps = 0.0, results[26]
    for skipped, norm in steps:
        assert norm == before if skipped else 0 < norm < 10 * low[-1]
        before = norm
    assert 2 < [skipped for skipped, _ in steps].count(True) < len(steps) - 2


def padding(context: Any, config: dict[str, Any]) -> float:
    """The largest padded weight of the vocabulary's matrices, after some steps."""
    trainer = make_trainer(context, config)
    for _ in range(3):
        trainer.step()
    trainer.close()
    tensors = [weight for weight in trainer.store.weights.values() if weight.spec.segments[0].padded]
    assert len(tensors) == 2, "embedding and head"
    largest = 0.0
    for weight in tensors:
        rows = weight.spec.segments[0].local(trainer.mesh.coordinates).sizes[0]
        assert (weight.tensor.shape[0] > rows) == (trainer.mesh.tp.rank == 1)
        largest = max(largest, weight.tensor[rows:].abs().sum().item())
    return largest


def test_padding_stays_zero(ranks, prefix):
    assert ranks.run(4, padding, configuration(prefix, {"tp": 2, "dp": 2}, 3)) == [0.0] * 4


def memory_of(context: Any, config: dict[str, Any]) -> tuple[ModelStates, ModelStates, list[str]]:
    trainer = make_trainer(context, config)
    trainer.step()
    trainer.close()
    return measured(trainer), formula(trainer), report(trainer)


def test_its_memory_is_reported(ranks, prefix):
    """An error for every element of a compressed matrix, and a factor; nothing is said where nothing is compressed."""
    measured, expected, lines = ranks.run(2, memory_of, configuration(prefix, {"dp": 2, "zero": 1}, 2))[0]
    # 101 tokens, padded
    shapes = [(104, 32), *[(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)] * 4, (104, 32)]
    assert expected.powersgd == 4 * sum(n * m + 2 * m for n, m in shapes)
    assert measured == expected and "powersgd 0.2, total" in lines[0]
    assert re.search(r"\(planned [\d.]+ MB; [\d.]+ MB at a step's peak\)", lines[0])
    assert "powersgd" not in ranks.run(2, memory_of, configuration(prefix, {"dp": 2, "zero": 1}, None))[0][2][0]


# ---- checkpoints

HALF = 2
SAVED: dict[str, Case] = {
    "dp 2": {"dp": 2, "zero": 1},
    "dp 4": {"dp": 4, "zero": 0},
    "pp 2, dp 2, tied": {"pp": 2, "dp": 2, "zero": 1, "tied": True},
    "tp 2, dp 2": {"tp": 2, "dp": 2, "zero": 1, "sequence_parallel": True, "kv_heads": 1},
}


@pytest.fixture(scope="module")
def saved(ranks, prefix):
    known: dict[tuple[str, int | None], list[dict[str, Any]]] = {}

    def run(layout: str, rank: int | None = 4) -> list[dict[str, Any]]:
        if (layout, rank) not in known:
            config = configuration(prefix, SAVED[layout], rank)
            config["run"]["name"] = f"{layout}-{rank}".replace(" ", "").replace(",", "-")
            known[layout, rank] = ranks.run(world(SAVED[layout]), jobs_reduction.train_and_save, config, HALF, HALF)
        return known[layout, rank]

    return run


@pytest.mark.parametrize("layout", SAVED)
def test_resuming_is_bitwise_the_run_that_never_stopped(layout, ranks, prefix, saved):
    expected = saved(layout)
    config = configuration(prefix, SAVED[layout], 4, load=expected[0]["directory"])
    for got, straight in zip(
        ranks.run(world(SAVED[layout]), jobs_reduction.resume, config, HALF), expected, strict=True
    ):
        assert got["losses"] == straight["losses"][HALF:] and got["notes"] == []
        assert all(torch.equal(value, straight["errors"][name]) for name, value in got["errors"].items())
        assert all(value.any() for value in got["errors"].values())


def factors_apart(context: Any, config: dict[str, Any]) -> bool:
    trainer = make_trainer(context, config)
    trainer.step()
    trainer.close()
    assert trainer.store.reducer.powersgd is not None
    return all(
        matrix.factor.untyped_storage().nbytes() == matrix.factor.nbytes
        for matrix in trainer.store.reducer.powersgd.matrices
    )


def test_factors_lie_where_a_checkpoint_would_fill_them(ranks, prefix):
    """As parts of what travelled they would be aligned otherwise than after a resume, and BLAS would round
    otherwise."""
    assert all(ranks.run(2, factors_apart, configuration(prefix, {"dp": 2, "zero": 1}, 1)))


def test_one_copy_of_a_tied_tensor_takes_what_was_owed_to_both(ranks, prefix, saved):
    before = saved("pp 2, dp 2, tied")
    got = ranks.run(
        2,
        jobs_reduction.resume,
        configuration(prefix, {"dp": 2, "zero": 1, "tied": True}, 4, load=before[0]["directory"]),
        1,
    )
    for dp, rank in enumerate(got):
        first, last = (before[pp * 2 + dp]["errors"] for pp in (0, 1))
        assert torch.equal(
            rank["errors"]["embedding.weight"], first["embedding.weight"] + last["embedding.weight.copy"]
        )


@pytest.mark.parametrize("layout, other", [("dp 2", "dp 4"), ("dp 4", "dp 2")])
def test_other_ranks_share_what_is_owed(layout, other, ranks, prefix, saved):
    before = saved(layout)
    got = ranks.run(
        world(SAVED[other]),
        jobs_reduction.resume,
        configuration(prefix, SAVED[other], 4, load=before[0]["directory"]),
        HALF,
    )
    sizes = [SAVED[each]["dp"] for each in (layout, other)]
    assert got[0]["notes"] == [
        f"parallel.dp changed from {sizes[0]} to {sizes[1]}: PowerSGD's error feedback is divided equally among the "
        "current ranks; "
        "the resumed run will not be bitwise identical"
    ]
    for name in before[0]["errors"]:
        owed = sum(rank["errors"][name] for rank in before)
        assert all(torch.equal(rank["errors"][name], got[0]["errors"][name]) for rank in got)
        assert (got[0]["errors"][name] * sizes[1] - owed).abs().max() <= 1e-6 * owed.abs().max()
    assert got[0]["losses"] == pytest.approx(before[0]["losses"][HALF:], rel=1e-3)


CHANGES: dict[str, tuple[str, int | None, Case, int | None, str]] = {
    "begins": (
        "dp 2",
        None,
        {"dp": 2},
        4,
        "parallel.powersgd_rank changed from null to 4: PowerSGD's error feedback is initialized to zero",
    ),
    "ends": (
        "dp 2",
        4,
        {"dp": 2},
        None,
        "parallel.powersgd_rank changed from 4 to null: PowerSGD's error feedback is discarded",
    ),
    "one process": ("dp 2", 4, {}, 4, "parallel.dp changed from 2 to 1: PowerSGD's error feedback is discarded"),
    "another rank": (
        "dp 2",
        4,
        {"dp": 2},
        2,
        "parallel.powersgd_rank changed from 4 to 2: PowerSGD's error feedback is kept",
    ),
    "another tp": (
        "dp 2",
        4,
        {"dp": 2, "tp": 2},
        4,
        "parallel.tp changed from 1 to 2: PowerSGD's error feedback is kept",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_changes_are_announced(change, ranks, prefix, saved):
    layout, rank, case, new_rank, note = CHANGES[change]
    before = saved(layout, rank)
    got = ranks.run(
        world(case), jobs_reduction.resume, configuration(prefix, case, new_rank, load=before[0]["directory"]), 1
    )
    assert (
        len(got[0]["notes"]) == 1
        and got[0]["notes"][0].startswith(note)
        and got[0]["notes"][0].endswith("not be bitwise identical")
    )
    for name, value in got[0]["errors"].items():
        if change == "begins":
            assert not value.any()
        elif change == "another rank":
            assert torch.equal(value, before[0]["errors"][name])
        else:  # this tp rank's part of it
            old = before[0]["errors"][name]
            assert (
                torch.equal(value, old[tuple(slice(size) for size in value.shape)]) or value.shape[0] * 2 > old.shape[0]
            ), name

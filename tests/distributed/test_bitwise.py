"""Where additions keep their order, runs are equal bit for bit: losses, weights and both moments.

Equal micro-batch size, clipping off; losses and states are compared with ==. The gradient norm only measures (no
clipping acts), and ranks sum it in another order, so across layouts it agrees to rounding; a repeated run repeats it
too.

Every schedule is 1f1b, bit for bit, on the same ranks with the same microbatches: gradients of a stage add in ascending
microbatch order, whether they are computed with the backward or put off, and a sum over dp does not depend on which
layers share a rank. Two cases are equal only to rounding (1e-6):

- tied embeddings where both copies are one accumulator, on a rank that holds the first and the last stage (zb-v,
  v-half; every split backward on one rank): the head's and the embedding's gradients then alternate as the schedule has
  them. `run.deterministic` keeps the two apart until the end of the step, and makes it bitwise again. On ranks apart
  they are two accumulators anyway.
- ZeRO-2 under a split backward: a microbatch's reduction takes what has been added to a bucket by then, and norms are
  ahead of matrices.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from megalite.optimizer.registry import STATE
from tests.support import jobs, jobs_training
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces import layouts
from tests.support.spaces.layouts import Case

STEPS = 2
MODEL = {"tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 5, "masked": True, "dropout": 0.1}
BASE: Case = {**SINGLE, **MODEL}

# name: (model and train options of both, one layout, the other layout)
PAIRS: dict[str, tuple[Case, Case, Case]] = {
    **{f"zero 0 and 1, dp {dp}": ({"dp": dp, "microbatches": 2}, {"zero": 0}, {"zero": 1}) for dp in (2, 3, 4)},
    "zero 0 and 1, tp 2, pp 2, dp 2": (
        {"tp": 2, "pp": 2, "dp": 2, "microbatches": 4, "tied": True},
        {"zero": 0},
        {"zero": 1},
    ),
    "pp 1 and 2": ({"microbatches": 4}, {"pp": 1}, {"pp": 2}),
    "pp 1 and 4": ({"microbatches": 8}, {"pp": 1}, {"pp": 4}),
    "pp 1 and 2 with tp 2 and sequence parallelism": (
        {"tp": 2, "sequence_parallel": True, "microbatches": 4},
        {"pp": 1},
        {"pp": 2},
    ),
    # the dp ranks are neighbours in both
    "pp 1 and 4 with dp 2": ({"dp": 2, "zero": 1, "microbatches": 4}, {"pp": 1}, {"pp": 4}),
    "dp ranks apart by tp": ({"tp": 2, "dp": 2, "microbatches": 4}, {"pp": 1, "zero": 0}, {"pp": 2, "zero": 1}),
    "tied, pp 1 and 2, deterministic": ({"tied": True, "microbatches": 4, "deterministic": True}, {"pp": 1}, {"pp": 2}),
    "tied, dp 2, pp 1 and 2, deterministic": (
        {"tied": True, "dp": 2, "zero": 1, "microbatches": 4, "deterministic": True},
        {"pp": 1},
        {"pp": 2},
    ),
    "tied, tp 2, pp 1 and 4, deterministic": (
        {"tied": True, "tp": 2, "microbatches": 4, "deterministic": True},
        {"pp": 1},
        {"pp": 4},
    ),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), MODEL["vocab_size"])


def run(ranks, prefix: str, case: Case, precision: str = "fp32", **changes: dict[str, Any]) -> list[dict[str, Any]]:
    changes = {"run": {"deterministic": case.get("deterministic", False)}, "train": {"grad_clip": 0.0}, **changes}
    config = config_of(case, prefix, precision)
    config = {section: {**values, **changes.get(section, {})} for section, values in config.items()}
    return ranks.run(case["tp"] * case["pp"] * case["dp"], jobs.train, config, STEPS, STATE)


def assert_bitwise(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for found in got:
        assert found["losses"] == expected[0]["losses"]
    tensors, others = got[0]["tensors"], expected[0]["tensors"]
    assert tensors.keys() == others.keys()
    differing = [name for name, value in tensors.items() if not torch.equal(value, others[name])]
    assert not differing


def assert_close(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal to rounding."""
    assert got[0]["losses"] == pytest.approx(expected[0]["losses"], rel=1e-6)
    for name, value in got[0]["tensors"].items():
        assert (value - expected[0]["tensors"][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("pair", PAIRS)
def test_layouts_with_one_order_of_additions(pair, ranks, prefix):
    common, one, other = PAIRS[pair]
    got, expected = (run(ranks, prefix, {**BASE, **common, **each}) for each in (one, other))
    assert_bitwise(got, expected)
    assert got[0]["grad_norms"] == pytest.approx(expected[0]["grad_norms"], rel=1e-6)


# ---- schedules

OTHERS = tuple(schedule for schedule in layouts.OPTIONS["schedule"] if schedule != "1f1b")
RECOMPUTE = {"interleaved-3": "full", "zb-h2": "full", "zb-v": "selective", "v-half": "every-2"}
"""One schedule of each kind with a mode; test_equivalence.py has every pair, against one process."""
ONE_ACCUMULATOR = ("zb-v", "v-half")  # their first and last stage have one rank
LAYERS = {2: 7, 4: 13, 8: 17}  # more than there are stages, so that they are uneven


@pytest.fixture(scope="module")
def one_f_one_b(ranks, prefix):
    """The run under 1f1b: computed once for each case."""
    known: dict[tuple, list[dict[str, Any]]] = {}

    def run_once(case: Case) -> list[dict[str, Any]]:
        key = tuple(sorted(case.items()))
        if key not in known:
            known[key] = run(ranks, prefix, case)
        return known[key]

    return run_once


@pytest.mark.parametrize(("pp", "schedule"), [*product((4,), OTHERS), (8, "zb-v")])
def test_every_schedule_is_1f1b(pp, schedule, ranks, prefix, one_f_one_b):
    """Eight ranks under the other schedules are compared with one process, in test_equivalence.py; two ranks are
    below."""
    case = {**BASE, "pp": pp, "microbatches": 8, "layers": LAYERS[pp]}
    assert_bitwise(run(ranks, prefix, {**case, "schedule": schedule}), one_f_one_b(case))


@pytest.mark.parametrize("schedule", RECOMPUTE)
def test_schedules_are_1f1b_with_tp_dp_and_recomputation_inside(schedule, ranks, prefix, one_f_one_b):
    case = {
        **BASE,
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "zero": 1,
        "sequence_parallel": True,
        "microbatches": 4,
        "layers": LAYERS[2],
    }
    got = run(ranks, prefix, {**case, "schedule": schedule, "recompute": RECOMPUTE[schedule]})
    assert_bitwise(got, one_f_one_b(case))


@pytest.mark.parametrize(
    ("schedule", "deterministic"),
    [*product(OTHERS, (False,)), ("zb-h2", True), *product(ONE_ACCUMULATOR, (True,))],
)
def test_tied_embeddings_under_every_schedule(schedule, deterministic, ranks, prefix, one_f_one_b):
    case = {**BASE, "tied": True, "pp": 2, "microbatches": 8, "layers": LAYERS[2], "deterministic": deterministic}
    got, expected = run(ranks, prefix, {**case, "schedule": schedule}), one_f_one_b(case)
    if deterministic or schedule not in ONE_ACCUMULATOR:
        assert_bitwise(got, expected)
    else:
        assert_close(got, expected)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-2", "interleaved-3", "zb-v"])
def test_stage_2_under_every_kind_of_schedule(schedule, ranks, prefix, one_f_one_b):
    case = {**BASE, "pp": 2, "dp": 2, "zero": 2, "microbatches": 4, "layers": LAYERS[2]}
    got, expected = run(ranks, prefix, {**case, "schedule": schedule}), one_f_one_b(case)
    (assert_bitwise if schedule != "zb-v" else assert_close)(got, expected)


def evaluated(ranks, prefix: str, schedule: str) -> list[list[float]]:
    case = {**BASE, "pp": 2, "microbatches": 4, "layers": LAYERS[2], "schedule": schedule}
    config = config_of(case, prefix, data={"validation": 0.02, "train": prefix, "sequence_length": 16})
    config["train"]["grad_clip"] = 0.0
    return ranks.run(2, jobs_training.evaluate, config, 2)


@pytest.fixture(scope="module")
def evaluated_by_1f1b(ranks, prefix) -> list[float]:
    return evaluated(ranks, prefix, "1f1b")[0]


@pytest.mark.parametrize("schedule", OTHERS)
def test_evaluation_under_every_schedule(schedule, ranks, prefix, evaluated_by_1f1b):
    """Of the initial weights, and after steps under the schedule itself."""
    losses, expected = evaluated(ranks, prefix, schedule), evaluated_by_1f1b
    assert all(rank == expected for rank in losses) and expected[0] != expected[1]


def test_the_comparison_sees_another_order_of_additions(ranks, prefix):
    """A different micro-batch size is the smallest change of order; were it equal too, equality above would say
    nothing."""
    one, other = (run(ranks, prefix, {**BASE, "microbatches": count}) for count in (2, 4))
    assert one[0]["losses"] == pytest.approx(other[0]["losses"], rel=1e-5)
    with pytest.raises(AssertionError):
        assert_bitwise(one, other)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "sequence_parallel": True}])
def test_a_repeated_run_is_itself(layout, precision, ranks, prefix):
    case = {**BASE, "tied": True, "kv_heads": 1, "microbatches": 2, **layout}
    one, other = (run(ranks, prefix, case, precision, train={"grad_clip": 0.5}) for _ in range(2))
    assert_bitwise(one, other)
    assert one[0]["grad_norms"] == other[0]["grad_norms"]
    assert max(one[0]["grad_norms"]) > 0.5, "clipping acts"

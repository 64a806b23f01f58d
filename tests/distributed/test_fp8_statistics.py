"""Statistics of fp8 operands: those of one process in every layout, and of tensors quantized here.

Shares are sums of whole numbers and therefore equal; errors are sums in another order. No bit of a run changes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megalite_kernels.fp8 import quantize, quantize_mx

from megalite.monitoring.fp8_statistics import Fp8Statistics, operand_sums
from megalite.training.verify import global_tensors
from tests.distributed.test_fp8 import configs
from tests.monitoring.test_metrics import example
from tests.support.configs import write_tokens
from tests.support.jobs import make_trainer

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    # optimistic steps
    ("powers of two, inner layers", {"tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-v"}),
    ("mxfp8", {"dp": 2, "zero": 3, "recompute": "full"}),
    ("experts", {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True}),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def measured(context: Any, config: dict[str, Any], observed: bool = True) -> dict[str, Any]:
    """Train three steps, of which the second is measured. In optimistic steps it begins with unconfirmed weights."""
    config = {**config, "logging": {"fp8_interval": 2}}
    trainer = make_trainer(context, config)
    observer, numbers = Fp8Statistics(trainer), dict[int, Any]()
    try:
        for step in range(1, 4):
            if observed:
                observer.before(step)
            results = trainer.train_step(wait=step == 3)
            if observed:
                observer.after(step)
            numbers |= {result.step: observer.numbers(example(result.step)) for result in results}
        return {"numbers": numbers, "tensors": global_tensors(trainer)}
    finally:
        trainer.close()


def numbers_of(value: Any) -> list[float]:
    return [-1.0 if each is None else each for each in (value if isinstance(value, list) else [value])]


def tolerance(name: str) -> float:
    """Relative. Queries that see a single key have no gradient, but rounding noise, whose codes are any."""
    if name.startswith("fp8_error"):
        return 1e-6
    return 0.1 if name.endswith(("/dy", "/attention.qkv.dy")) else 0.0


@pytest.mark.parametrize("mechanism, layout", LAYOUTS, ids=str)
def test_a_layout_has_the_statistics_of_one_process(mechanism, layout, ranks, references, prefix):
    several, one = configs(prefix, mechanism, **layout)
    world = math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp"))
    results, alone = ranks.run(world, measured, several), references.run(measured, one)
    expected, got = alone["numbers"], results[0]["numbers"]
    assert got[1] == got[3] == expected[1] == {} and got[2].keys() == expected[2].keys()
    for name, value in expected[2].items():
        assert numbers_of(got[2][name]) == pytest.approx(numbers_of(value), rel=tolerance(name), abs=0), name
    assert all(result["numbers"] == got for result in results)
    down = next(
        values for name, values in got[2].items() if name.startswith("fp8_error_by_layer/mlp.") and ".x" in name
    )
    assert len(down) == 4 and (down[0] is None) == mechanism.startswith("powers")
    for name in ("x", "w", "dy", "forward", "input_gradient"):
        assert 0.01 < got[2][f"fp8_error/{name}"] < 0.1
    assert 0 < got[2]["fp8_flushed/dy"] < 1 and 0 < got[2]["fp8_saturated/x"] < 0.2


def test_no_bit_changes(references, prefix):
    mechanism, layout = LAYOUTS[0]
    _, one = configs(prefix, mechanism, **layout)
    observed, plain = references.run(measured, one)["tensors"], references.run(measured, one, False)["tensors"]
    assert all(torch.equal(value, plain[name]) for name, value in observed.items())


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_shares_of_known_values(recipe):
    """One row of two blocks: the largest element, its half, a value near the largest, the smallest ones, zeros."""
    block = 128 if recipe == "block" else 32
    row = torch.zeros(1, 2 * block)
    row[0, :5] = torch.tensor([448.0, -224.0, 440.0, 2.0**-10, 2.0**-9])  # 2⁻¹⁰ is a tie, and goes to zero
    row[0, block:] = 1.0
    codes = quantize(row, (1, block)) if recipe == "block" else quantize_mx(row)
    elements, saturated, flushed, error, square = operand_sums(row, codes).tolist()
    ones = block if recipe == "block" else 0  # mxfp8 scales 1 to 256
    assert (elements, saturated, flushed) == (2 * block, 2 + ones, 1)
    assert error == pytest.approx(8.0**2 + 2.0**-20, rel=1e-6)
    assert square == pytest.approx(row.double().square().sum().item())
    half = operand_sums(row, codes, torch.tensor([[0.5]])).tolist()
    assert half[:3] == [block, (2 + ones) / 2, 0.5]

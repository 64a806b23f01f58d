"""A run in fp8 is explained by the rounding of its operands; one fault is named by step, layer and operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megalite_kernels.fp8 import Quantized

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.parallel import fp8
from megalite.parallel.fp8 import Fp8Format, Fp8Matmuls, QuantizedWeight
from megalite.training.fp8_comparison import Fp8Check, without_fp8
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.jobs import make_trainer

CASE = {**SINGLE, "tied": False, "kv_heads": 4, "vocab_size": 96, "layers": 3, "masked": True, "dropout": 0.0}
LLAMA = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "initializer_range": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt": LLAMA | {"position": "learned", "norm": "layer", "hidden_act": "gelu", "gated_mlp": False, "mlp_bias": True},
    "moe": LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
SOUND = [
    ("llama", {"fp8": "block"}),
    ("gpt", {"fp8": "mxfp8", "precision": "bf16"}),
    ("moe", {"fp8": "block", "fp8_power_of_two": True, "precision": "bf16"}),
]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def config(prefix: str, model: str, train: dict[str, Any], seed: int = 1, **parallel: Any) -> dict[str, Any]:
    changed = config_of({**CASE, **parallel}, prefix, model=MODELS[model])
    changed["train"] |= {"global_batch_size": 4, "micro_batch_size": 2, "recompute": "none"} | train
    changed["run"]["seed"] = seed
    return changed


def checked(trainer: Trainer, steps: int = 2) -> Fp8Check:
    check = Fp8Check(trainer)
    for step in range(1, steps + 1):
        check.step = step
        trainer.step()
    trainer.close()
    return check


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model, train", SOUND, ids=str)
def test_rounding_explains_a_run_without_a_fault(model, train, seed, prefix):
    parsed = from_dict(config(prefix, model, train, seed))
    check = checked(Trainer(parsed, build.make_mesh(parsed)))
    assert check.first is None, check.first
    assert len(check.errors) == 2 * len(check.names) and all(0.01 < error < 0.1 for error in check.errors.values())


def transposed(matmuls: Fp8Matmuls) -> None:
    """The scales of a weight are those of its transpose."""
    quantized = matmuls.quantized

    def changed() -> QuantizedWeight:
        updates, (codes, scales), _ = quantized()
        wrong = Quantized(codes, scales.t())
        return QuantizedWeight(updates, wrong, wrong.t)

    matmuls.quantized = changed  # type: ignore[method-assign]


class OneWrongScale(Fp8Format):
    def activations(self, rows: torch.Tensor) -> Quantized:
        codes = super().activations(rows)
        codes.scales[5, -1] *= 1.01
        return codes


def one_block(matmuls: Fp8Matmuls) -> None:
    matmuls.fp8 = OneWrongScale(*matmuls.fp8)


def stale(matmuls: Fp8Matmuls) -> None:
    """The codes of a weight are those of the first step."""
    matmuls.updates = lambda: 0


def mixed_up(matmuls: Fp8Matmuls) -> None:
    """The codes are right, but the kernel takes the scales of other rows."""
    multiply, own = fp8.multiply, matmuls.quantized

    def changed(a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        if b.codes.data_ptr() == own().along_inputs.codes.data_ptr():
            a = Quantized(a.codes, a.scales.roll(1, 0))
        return multiply(a, b, dtype)

    fp8.multiply = changed


FAULTS: list[tuple[Callable[[Fp8Matmuls], None], int, str, str | None]] = [
    (transposed, 1, "forward", "w"),
    (one_block, 1, "forward", "x"),
    (stale, 2, "forward", "w"),
    (mixed_up, 1, "forward", None),
]


@pytest.mark.parametrize("fault, step, product, operand", FAULTS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_fault_is_named_by_step_matrix_and_operand(fault, step, product, operand, prefix, monkeypatch):
    monkeypatch.setattr(fp8, "multiply", fp8.multiply)  # restored afterwards
    parsed = from_dict(config(prefix, "llama", {"fp8": "block"}))
    trainer = Trainer(parsed, build.make_mesh(parsed))
    name = "layers.1.attention.out.weight"
    matmuls = trainer.store.weights[name].matmuls
    assert isinstance(matmuls, Fp8Matmuls)
    fault(matmuls)
    first = checked(trainer).first
    assert first is not None
    _, named = first
    assert (named.step, named.matrix, named.product, named.operand) == (step, name, product, operand)
    what = operand or "the product"
    assert named.excess > 1 and f"step {step}: {name}, forward, rank 0: {what} " in str(named)


def first_of_rank(context: Any, config: dict[str, Any]) -> Any:
    trainer = make_trainer(context, config)
    weight = trainer.store.weights.get("layers.2.attention.out.weight")
    if weight is not None and trainer.mesh.tp.rank == 1:
        assert isinstance(weight.matmuls, Fp8Matmuls)
        one_block(weight.matmuls)
    return checked(trainer, 1).first


def test_the_rank_with_the_fault_is_named(ranks, prefix):
    *others, last = ranks.run(4, first_of_rank, config(prefix, "llama", {"fp8": "block"}, tp=2, pp=2))
    assert others == [None] * 3
    assert (last[1].matrix, last[1].operand, last[1].rank) == ("layers.2.attention.out.weight", "x", 3)


def test_the_other_run_differs_in_its_matmuls_only(prefix: str) -> None:
    changed = config(prefix, "llama", {"fp8": "block", "fp8_first_last": 1})
    parsed = from_dict(changed | {"logging": {"fp8_interval": 1}})
    plain = without_fp8(parsed)
    assert (plain.train.fp8, plain.train.fp8_first_last, plain.logging.fp8_interval) == ("none", 0, None)
    assert parsed.train.fp8 == "block" and plain.model == parsed.model and plain.data == parsed.data

"""Training with kernels and without: the same losses."""

import pytest
from megalite_kernels.launch import Variant

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from tests.kernels.compiling import MODULES
from tests.support.configs import SINGLE, STEPS, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 101,
    "layers": 1,
    "masked": True,
    "dropout": 0.1,
    "microbatches": 2,
}
INTERPRETED_STEPS = 5
# 64 tokens a step: the interpreter takes a millisecond for a program
BATCH = {"global_batch_size": 4, "micro_batch_size": 2}


def test_the_same_losses_with_kernels_and_without(device, tmp_path, monkeypatch):
    prefix = write_tokens(tmp_path, CASE["vocab_size"])
    used, launch = set(), Variant.launch

    def noted(self: Variant, grid: tuple[int, ...], *args: object) -> None:
        used.add(self.kernel.fn.__module__.removeprefix("megalite_kernels."))
        launch(self, grid, *args)

    monkeypatch.setattr(Variant, "launch", noted)
    results = {}
    for kernels in ("torch", "triton"):
        assert used == set(), "the run without kernels launched some"
        config = from_dict(config_of(CASE, prefix, train={**BATCH, "kernels": kernels}))
        trainer = Trainer(config, build.make_mesh(config), device)
        results[kernels] = [trainer.step() for _ in range(STEPS if device == "cuda" else INTERPRETED_STEPS)]
        trainer.close()
    elsewhere = {"ordered_sum_triton", "attention_part_triton"}  # of several ranks: the tests of these names
    elsewhere |= {"permutation_triton", "grouped_weight_grad_triton"}  # of experts
    elsewhere |= {"causal_conv_triton", "gated_norm_triton", "recurrence_triton"}  # of hybrid layers
    elsewhere |= {"index_scores_triton", "selected_rows_triton", "sparse_attention_triton"}  # of an indexer
    elsewhere.add("block_matmul_triton")  # of lora.base
    elsewhere |= {"fp8_triton", "fp8_matmul_triton", "fp8_mx_matmul_triton"}  # of train.fp8
    elsewhere.add("fp8_weight_grad_triton")  # of train.fp8_weight_gradients
    if device == "cuda":
        elsewhere.add("attention_triton")  # fp32 takes the reference there
    assert used == set(MODULES) - elsewhere, "a kernel that training does not take is proved by nothing here"
    for with_kernels, without in zip(results["triton"], results["torch"], strict=True):
        assert with_kernels.loss == pytest.approx(without.loss, rel=1e-5)
        assert with_kernels.grad_norm == pytest.approx(without.grad_norm, rel=1e-5)
    assert results["torch"][-1].loss != results["torch"][0].loss

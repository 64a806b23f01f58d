"""What a training step asks of a GPU: that the host reads the step's results once, and waits for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict
from megalite.parallel.pipeline import graphed_runtime
from megalite.training import weight_update
from megalite.training.trainer import Trainer
from megalite.training.verify import global_tensors
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.device_rules import DEVICE, HOST, DeviceRules, watched
from tests.support.operation_graphs import OperationGraphs

CASE = {
    **SINGLE,
    "tied": True,
    "kv_heads": 2,
    "vocab_size": 101,
    "layers": 2,
    "masked": False,
    "dropout": 0.1,
    "microbatches": 2,
}
BATCH = {"global_batch_size": 4, "micro_batch_size": 2}


def trainer_of(
    directory: Path, device: str | torch.device, precision: str, train: dict[str, Any], **case: Any
) -> Trainer:
    prefix = write_tokens(directory, CASE["vocab_size"])
    config = from_dict(config_of({**CASE, **case}, prefix, precision, train={**BATCH, "precision": precision, **train}))
    return Trainer(config, build.make_mesh(config), device)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what the host reads: by `read_later`, which waits for its own copy only, or by `Tensor.cpu`, which
    waits for all."""
    results: list[torch.Size] = []
    later, cpu = weight_update.read_later, Tensor.cpu

    def noted(x: Tensor) -> Callable[[], Tensor]:
        results.append(x.shape)
        return later(x)

    def waits(x: Tensor) -> Tensor:
        results.append(x.shape)
        return cpu(x)

    monkeypatch.setattr(weight_update, "read_later", noted)
    monkeypatch.setattr(Tensor, "cpu", waits)
    return results


MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "router_aux_loss_coef": 0.02,
    "router_z_loss_coef": 0.01,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
FACTORS = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 8,
    "attention_factor": 1.1,
}
LONGROPE = {"rope_scaling": {"rope_type": "longrope", **FACTORS}}
DOCUMENTS = {"masked": True, "dropout": 0.0}
ADAPTERS = {"rank": 8, "dropout": 0.1}
OF_EXPERTS = {"lora": {**ADAPTERS, "targets": ["q", "gate", "experts.in", "experts.down"]}}
STEPS: dict[str, dict[str, Any]] = {
    "dropout, clipping, moving average": {"case": {"ema": True}},
    "documents, LongRoPE": {"case": DOCUMENTS, "model": LONGROPE},
    "Muon": {"case": {"optimizer": "muon"}},
    "latents, further tokens": {"case": {"kv_heads": 4, "dropout": 0.0}, "model": {**LATENT, "mtp_layers": 1}},
    "adapters with dropout": {"model": {}, "lora": {**ADAPTERS, "targets": "all-linear"}},
    "mixture, adapters of experts": {
        "model": {**MIXTURE, "router_balance": "sequence", "n_group": 2, "topk_group": 1},
        **OF_EXPERTS,
    },
    "mixture, capacity, biases, documents": {
        "case": {**DOCUMENTS, "recompute": "full"},
        "model": {
            **MIXTURE,
            "expert_capacity_factor": 0.7,
            "router_balance": "bias",
            "mlp_bias": True,
            "router_logit_bias": True,
        },
    },
}


@pytest.mark.parametrize(
    "precision, options", [*[("bf16", each) for each in STEPS.values()], ("fp16", {})], ids=[*STEPS, "loss scale"]
)
def test_the_host_waits_for_the_results_alone(tmp_path: Path, precision: str, options: dict[str, Any]) -> None:
    """The norm, the loss, the pace and the wish to stop, in one tensor, with the update queued behind it. Nothing is
    read or uploaded besides (`tests.support.device_rules`)."""
    case, sections = (
        {"layers": 1, "microbatches": 1, **options.get("case", {})},
        {key: options[key] for key in options.keys() - {"case"}},
    )
    config = config_of({**CASE, **case}, write_tokens(tmp_path, CASE["vocab_size"]), precision, **sections)
    config["train"] |= {"global_batch_size": 2, "micro_batch_size": 2}
    run_config = from_dict(config)
    rules = watched(Trainer(run_config, build.make_mesh(run_config), DEVICE))
    assert not rules.faults
    assert len(rules.waits) == 1 and rules.waits[0], "the update is queued when the host waits"


GRAPHED = {"dropout": 0.0, "masked": False, "tied": False, "microbatches": 2}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_is_read_or_uploaded_while_graphs_are_recorded(
    recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either would end a recording on a GPU."""
    monkeypatch.setattr(graphed_runtime, "CudaGraphs", OperationGraphs)
    train = {"graphs": True, "loss_chunk": 8}
    trainer = trainer_of(tmp_path, DEVICE, "bf16", train, **GRAPHED, recompute=recompute)
    rules = DeviceRules()
    with patch.object(trainer.loader, "step", rules.placed(trainer.loader.step, HOST)), rules:
        trainer.train_step()
        rules.faults.clear()
        trainer.train_step()
        trainer.close()
    assert trainer.parts.runtime.graphs.replays == {(0, 0): 4} and not rules.faults


def test_a_stage_that_cannot_be_recorded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_runtime, "CudaGraphs", OperationGraphs)
    trainer = trainer_of(tmp_path, "cpu", "fp32", {"graphs": True}, **GRAPHED)
    head = trainer.parts.stages[0].head
    assert head is not None
    head.loss = replace(head.loss, observe=lambda losses: losses.sum().item())
    trainer.step()
    with pytest.raises(
        RuntimeError, match=r"stage 0 could not be recorded .*: the host reads a number\. Set train\.graphs"
    ):
        trainer.step()
    trainer.loader.close()


def test_graphs_need_a_gpu(tmp_path: Path) -> None:
    """Also where no rule has asked for the device, as in megalite verify."""
    with pytest.raises(ConfigError, match="train.graphs = true requires a GPU"):
        trainer_of(tmp_path, "cpu", "fp32", {"graphs": True}, **GRAPHED)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision, kernels, case",
    [("bf16", "triton", {}), ("fp16", "torch", {"recompute": "full"}), ("fp32", "triton", {"schedule": "gpipe"})],
)
def test_graphs_on_a_gpu_train_like_the_eager_step(
    tmp_path: Path, precision: str, kernels: str, case: dict[str, Any]
) -> None:
    """Up to the order in which atomics add up the embedding's gradient."""
    runs = []
    for graphs in (False, True):
        trainer = trainer_of(
            tmp_path, "cuda", precision, {"kernels": kernels, "graphs": graphs, "loss_chunk": 8}, **GRAPHED, **case
        )
        results = [trainer.step() for _ in range(5)]
        scalars = [value for result in results for value in (result.loss, result.grad_norm)]
        runs.append((torch.tensor(scalars), global_tensors(trainer)))
        trainer.close()
    (eager, weights), (replayed, others) = runs
    rounding = 1e-4 if precision == "fp32" else 1e-2
    torch.testing.assert_close(replayed, eager, rtol=rounding, atol=0.0)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=rounding, atol=rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "case", [{}, {"masked": True, "dropout": 0.0}, {"recompute": "full"}], ids=["dropout", "documents", "recompute"]
)
def test_a_step_waits_for_the_gpu_once(
    tmp_path: Path, reads: list[torch.Size], case: dict[str, Any], precision: str, kernels: str
) -> None:
    trainer = trainer_of(tmp_path, "cuda", precision, {"kernels": kernels}, **case)
    trainer.step()  # compiles, and takes what is kept: tables, workspaces
    reads.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [trainer.step() for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.close()
    assert len(reads) == len(results) == 10
    assert all(torch.isfinite(torch.tensor(result.loss)) for result in results)

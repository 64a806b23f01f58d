"""What a training step asks of a GPU: that the host reads the step's results once, and waits for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.training import step_finalizer
from megalite.training.trainer import Trainer
from tests.distributed.support.configs import SINGLE, config_of, write_tokens

CASE = {**SINGLE, "tied": True, "kv_heads": 2, "vocab_size": 101, "layers": 2, "masked": False, "dropout": 0.1, "microbatches": 2}
BATCH = {"global_batch_size": 4, "micro_batch_size": 2}


def trainer_of(directory: Path, device: str, precision: str, train: dict[str, Any], **case: Any) -> Trainer:
    prefix = write_tokens(directory, CASE["vocab_size"])
    config = from_dict(config_of({**CASE, **case}, prefix, precision, train={**BATCH, "precision": precision, **train}))
    return Trainer(config, build.make_mesh(config), device)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what the host reads: by `read_later`, which waits for its own copy only, or by `Tensor.cpu`, which waits for all."""
    found: list[torch.Size] = []
    later, cpu = step_finalizer.read_later, Tensor.cpu

    def noted(x: Tensor) -> Callable[[], Tensor]:
        found.append(x.shape)
        return later(x)

    def waits(x: Tensor) -> Tensor:
        found.append(x.shape)
        return cpu(x)

    monkeypatch.setattr(step_finalizer, "read_later", noted)
    monkeypatch.setattr(Tensor, "cpu", waits)
    return found


def test_the_results_of_a_step_are_read_at_once(tmp_path: Path, reads: list[torch.Size]) -> None:
    """The norm, the loss, the pace and the wish to stop, in one tensor."""
    trainer = trainer_of(tmp_path, "cpu", "fp32", {})
    trainer.step()
    trainer.close()
    assert reads == [torch.Size([5])]


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", [{}, {"masked": True, "dropout": 0.0}, {"recompute": "full"}], ids=["dropout", "documents", "recompute"])
def test_a_step_waits_for_the_gpu_once(tmp_path: Path, reads: list[torch.Size], case: dict[str, Any], precision: str, kernels: str) -> None:
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

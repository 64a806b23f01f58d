"""Twelve steps of each hybrid family beside transformers with torch's AdamW: losses and gradient norms within 1e-5.

Matrices decay; convolutions, norms, A_log, D and biases do not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalite.assembly.parts import make_mesh
from megalite.config.load import from_dict
from megalite.data.indexed import IndexedTokens
from megalite.families.model_config import hf_shape
from megalite.training.trainer import Trainer
from tests.huggingface.hf_models import CASES, VOCAB, make, save
from tests.support.configs import write_tokens

STEPS, SEQUENCE, BATCH, LR, DECAY = 12, 24, 4, 3e-4, 0.1
FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe"),
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"),
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=STEPS * SEQUENCE * BATCH + 40)


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_transformers(family: str, prefix: str, tmp_path: Path) -> None:
    case = CASES[family]._replace(dtype=torch.float32, shard="5GB")
    model, directory = make(case), tmp_path / "theirs"
    with torch.no_grad():
        for value in model.parameters():  # at the scale of other tests transformers itself is 3e-5 from fp64
            value.mul_(0.5 if value.dim() > 1 else 1.0)
    save(model, case, directory)
    shape = hf_shape(str(directory)) | {"init_from": f"hf:{directory}", "from_hf": str(directory)}
    config = from_dict(
        {
            "run": {"dir": str(tmp_path), "name": "run"},
            "model": shape | {"router_bias_rate": 0.0} if shape.get("num_experts") else shape,  # theirs stay
            "parallel": {"dp": 1},
            "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
            "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": BATCH, "grad_clip": 1.0},
            "optimizer": {"lr": LR, "decay": "constant", "weight_decay": DECAY, "eps": 1e-8},
            "checkpoint": {"load": "none"},
        }
    )
    trainer = Trainer(config, make_mesh(config))
    ours = [trainer.step() for _ in range(STEPS)]
    trainer.close()
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens.astype("int64"))
    named = list(model.named_parameters())
    matrices = [value for name, value in named if value.dim() == 2 or value.dim() == 3 and "experts" in name]
    others = [value for _, value in named if all(value is not each for each in matrices)]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step, result in enumerate(ours):
        rows = torch.stack([tokens[(step * BATCH + row) * SEQUENCE :][: SEQUENCE + 1] for row in range(BATCH)])
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5), step
        assert result.grad_norm == pytest.approx(norm, rel=1e-5), step

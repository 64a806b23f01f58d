"""Every family on TP2 × PP2 with sequence parallelism: its tokens, and one training step that is exported, are those of
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.commands import convert as convert_hf
from megalite.data.indexed import IndexedTokens
from megalite.families.model_config import hf_shape
from tests.commands.jobs import step_and_tokens
from tests.huggingface.hf_models import (
    CASES,
    LAYOUT_CASES,
    VOCAB,
    greedy,
    load,
    make,
    random_ids,
    save,
)
from tests.support.configs import write_tokens
from tests.support.pool import RankPool

SEQUENCE, BATCH, COUNT = 24, 4, 4
# shorter and longer than any window
PROMPTS = [row[:length] for row, length in zip(random_ids().tolist(), (3, 19), strict=True)]
LAYOUT = {"tp": 2, "pp": 2}
# With an epsilon this large, AdamW's first step is proportional to the gradient: it has no sign function that amplifies
# rounding.
LR, EPS, BETAS = 100.0, 1.0, (0.9, 0.95)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tokens(tmp_path_factory.mktemp("tokens"), VOCAB, count=200)


def configuration(directory: Path, prefix: str) -> dict[str, Any]:
    model = hf_shape(str(directory)) | {"router_bias_rate": 0.0}  # transformers moves no bias of a router
    return {
        "run": {"dir": str(directory.parent), "name": "run"},
        "model": model | {"init_from": f"hf:{directory}", "from_hf": str(directory)},
        "parallel": {"dp": 1, "sequence_parallel": True, **LAYOUT},
        "data": {"train": prefix, "sequence_length": SEQUENCE, "shuffle": False},
        "train": {"steps": 1, "global_batch_size": BATCH, "micro_batch_size": BATCH // 2, "grad_clip": 0.0},
        "optimizer": {"lr": LR, "eps": EPS, "betas": BETAS, "weight_decay": 0.0, "decay": "constant"},
        "checkpoint": {"load": "none"},
    }


def train(model: Any, prefix: str) -> float:
    """One step of transformers' model and torch's AdamW. Returns the loss."""
    tokens = torch.from_numpy(IndexedTokens(prefix).tokens[: BATCH * SEQUENCE + 1].astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, EPS, weight_decay=0.0)
    logits = model(input_ids=tokens[:-1].view(BATCH, SEQUENCE), use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", LAYOUT_CASES)
def test_tokens_and_an_exported_step_are_those_of_transformers(
    name: str, prefix: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Every tensor of the export is within 1e-4 of the change that transformers' tensor has made, plus the rounding of
    its weights."""
    case = CASES[name]._replace(dtype=torch.float32)
    model = make(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    save(model, case, tmp_path / "theirs")
    results = ranks.run(4, step_and_tokens, configuration(tmp_path / "theirs", prefix), LAYOUT, PROMPTS, COUNT)
    assert [each.tokens for each in results] == [[greedy(model, prompt, COUNT)[0] for prompt in PROMPTS]] * 4
    assert [each.loss for each in results] == pytest.approx([train(model, prefix)] * 4, rel=1e-5)
    assert convert_hf.main(["export", results[0].checkpoint, str(tmp_path / "out")]) == 0
    exported = load(tmp_path / "out").state_dict()
    for key, value in model.state_dict().items():
        change = (value - before[key]).norm()
        assert (exported[key] - value).norm() <= 1e-4 * change + 1e-6 * value.norm(), key

"""The device decides whether a step is clipped or skipped; the host learns of it when the update is already queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 1,
    "masked": False,
    "dropout": 0.0,
    "microbatches": 1,
}
STEPS = 8


def train(
    tmp_path: Path, precision: str, elsewhere: bool, **sections: dict[str, Any]
) -> tuple[list[Any], list[Tensor], list[str]]:
    """Results, the optimizer's state at the end, and the order of updates and readings. `elsewhere`: as if the state
    were offloaded from a GPU, so that the host decides."""
    config = config_of(CASE, write_tokens(tmp_path, 96), precision)
    config = from_dict(
        {section: {**values, **sections.get(section, {})} for section, values in (config | {"faults": {}}).items()}
    )
    trainer = Trainer(config, build.make_mesh(config))
    updater, order = trainer.weight_updater, list[str]()
    if elsewhere:
        trainer.store.state.device = torch.device("meta")
    update, learn = trainer.optimizer.step, updater._learn

    def step(number: int, lr: float, divisor: Tensor | None) -> None:
        order.append("update")
        state, trainer.store.state.device = trainer.store.state.device, torch.device("cpu")
        update(number, lr, divisor)
        trainer.store.state.device = state

    def learned(*args: Any) -> None:
        order.append("learn")
        learn(*args)

    trainer.optimizer.step, updater._learn = step, learned  # type: ignore[method-assign]
    try:
        results = [trainer.step() for _ in range(STEPS)]
    finally:
        trainer.close()
    return results, trainer.optimizer.state.changing(), order


CLIPPED = {"train": {"grad_clip": 0.05}}
SPIKE = {"faults": {"inject": "spike:step=6,factor=9", "spike_sigma": 3.0, "spike_window": 4}}


@pytest.mark.parametrize(
    "precision, sections",
    [
        ("fp32", {"train": {"grad_clip": 0.0}}),
        ("bf16", CLIPPED),
        ("fp16", CLIPPED),  # its first steps overflow
        ("fp32", {**CLIPPED, "faults": {"inject": "nan:step=3 nan:step=5"}}),
        ("bf16", SPIKE),
    ],
    ids=["no clipping", "clipped", "overflow", "infinite", "spike"],
)
def test_as_if_the_host_had_decided(precision: str, sections: dict[str, Any], tmp_path: Path) -> None:
    result, expected = (train(tmp_path, precision, elsewhere, **sections) for elsewhere in (False, True))
    for ours, theirs in zip(result[0], expected[0], strict=True):
        for name in ("loss", "grad_norm", "fault", "streak", "loss_scale"):
            assert str(getattr(ours, name)) == str(getattr(theirs, name))  # as text: NaN is not equal to itself
    assert [each.skipped for each in result[0]].count(True) >= ("faults" in sections), "a bad step was there"
    assert all(torch.equal(x, y) for x, y in zip(result[1], expected[1], strict=True))
    assert result[2] == ["update", "learn"] * STEPS and expected[2][0] == "learn"

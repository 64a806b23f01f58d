"""bf16 computes in bf16, accumulates gradients in fp32, and updates fp32 master weights."""

import pytest
import torch

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens

CASE = {
    **SINGLE,
    "tied": False,
    "kv_heads": 2,
    "vocab_size": 96,
    "layers": 2,
    "masked": False,
    "dropout": 0.0,
    "microbatches": 8,
}


@pytest.fixture
def make(tmp_path):
    trainers = []

    def trainer(precision: str, **changes) -> Trainer:
        config = config_of(CASE, write_tokens(tmp_path, 96), precision)
        config = from_dict({section: {**values, **changes.get(section, {})} for section, values in config.items()})
        trainers.append(Trainer(config, build.make_mesh(config)))
        return trainers[-1]

    yield trainer
    for each in trainers:
        each.close()


def test_microbatches_add_up_in_fp32(make):
    """The sum of what each microbatch gives alone, made in fp32; sums made in bf16 are off by far more than the
    tolerance."""
    trainer = make("bf16")
    microbatches = trainer.loader.step(0)
    alone = build.schedule(trainer.config, 1)
    scale = 1.0 / (32 * 16)
    wide = {name: torch.zeros(weight.tensor.shape) for name, weight in trainer.store.weights.items()}
    narrow = {
        name: torch.zeros(weight.tensor.shape, dtype=torch.bfloat16) for name, weight in trainer.store.weights.items()
    }
    for each in microbatches:
        trainer.store.reducer.begin_step(1)
        trainer.parts.runtime.run(alone, [each], step=1, loss_scale=scale)
        trainer.store.reducer.finish()
        for name, weight in trainer.store.weights.items():
            assert weight.grad.dtype == torch.float32 and weight.tensor.dtype == torch.bfloat16
            wide[name] += weight.grad
            narrow[name] += weight.grad.bfloat16()
    trainer.store.reducer.begin_step(len(microbatches))
    trainer.parts.runtime.run(trainer.schedule, microbatches, step=1, loss_scale=scale)
    trainer.store.reducer.finish()
    for name, weight in trainer.store.weights.items():
        size = wide[name].norm()
        assert (weight.grad - wide[name]).norm() <= 1e-6 * size, name
        assert (weight.grad - narrow[name].float()).norm() > 1e-4 * size, name


def test_master_weights_keep_updates_that_bf16_would_lose(make):
    """At a rate of 1e-6 a weight near 1 cannot move in bf16; its master does, and the weight is always the rounded
    master."""
    trainer = make("bf16", optimizer={"lr": 1e-6, "decay": "constant", "warmup_steps": 0, "weight_decay": 0.0})
    before = {index: memory.master.clone() for index, memory in enumerate(trainer.store.buckets)}
    for _ in range(4):
        trainer.step()
    moved = 0.0
    for index, memory in enumerate(trainer.store.buckets):
        assert memory.master.dtype == torch.float32
        assert torch.equal(memory.weights[memory.start : memory.stop], memory.master.bfloat16())
        moved = max(moved, (memory.master - before[index]).abs().max().item())
    assert 2e-6 < moved < 6e-6
    norm = trainer.store.weights["norm.weight"].tensor.detach()
    assert torch.equal(norm, torch.ones_like(norm))


def test_bf16_follows_fp32_within_its_precision(make):
    runs = {precision: make(precision, optimizer={"lr": 3e-3}) for precision in ("fp32", "bf16")}
    losses = {precision: [trainer.step() for _ in range(12)] for precision, trainer in runs.items()}
    for wide, narrow in zip(losses["fp32"], losses["bf16"], strict=True):
        assert narrow.loss == pytest.approx(wide.loss, rel=5e-3)
        assert narrow.grad_norm == pytest.approx(wide.grad_norm, rel=3e-2)
    assert losses["fp32"][-1].loss < losses["fp32"][0].loss - 0.1
    assert [step.loss for step in losses["bf16"]] != [step.loss for step in losses["fp32"]]

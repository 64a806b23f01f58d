"""The loss of some tokens at a time, gradients with it: the same training as with whole logits, which then never
exist."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.mesh.mesh import Layout, Mesh
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.cross_entropy import CrossEntropy, loss_in_chunks
from megalite.parallel.tensor.linear import ColumnParallelLinear
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue
from tests.support import jobs_training
from tests.support.configs import SEQUENCE, case_of, config_of, micro_batch, write_tokens
from tests.support.spaces.layouts import Case

BASE: Case = case_of(tied=True, kv_heads=1, vocab_size=101, layers=2, masked=True, dropout=0.1, microbatches=2)
BATCH = 8
STEPS = 2
LAYOUTS: dict[str, Case] = {
    "single": {"recompute": "full"},
    "gpipe, two stages": {"pp": 2, "schedule": "gpipe"},
    "tp with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "tp, untied": {"tp": 2, "tied": False},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3, interleaved, untied": {
        "pp": 2,
        "dp": 2,
        "zero": 3,
        "schedule": "interleaved-2",
        "tied": False,
        "layers": 4,
    },
    "weight passes": {"pp": 2, "schedule": "zb-h1"},
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), BASE["vocab_size"])


def config(layout: Case, prefix: str, precision: str, chunk: int) -> dict:
    options = {
        "global_batch_size": BATCH,
        "micro_batch_size": micro_batch({**BASE, **layout}) // 4,
        "label_smoothing": 0.1,
        "z_loss": 1e-3,
        "loss_chunk": chunk,
    }
    base = config_of({**BASE, **layout}, prefix, precision, model={"logit_softcap": 8.0}, validation={"batches": 1})
    return {**base, "data": {**base["data"], "validation": 0.1}, "train": {**base["train"], **options}}


@pytest.mark.parametrize(
    "name, precision, tolerance",
    [*((name, "fp64", 1e-12) for name in LAYOUTS), ("tp with sequence parallelism", "fp32", 1e-6)],
)
def test_trains_as_with_whole_logits(name, precision, tolerance, ranks, prefix):
    """Chunks of 7 of 16 positions, or as near as whole positions come: the last is shorter."""
    layout = LAYOUTS[name]
    case = {**BASE, **layout}
    world, batch = case["tp"] * case["pp"] * case["dp"], micro_batch(case) // 4
    got = ranks.run(world, jobs_training.train_recording_logits, config(layout, prefix, precision, 7 * batch), STEPS)
    whole = ranks.run(world, jobs_training.train_recording_logits, config(layout, prefix, precision, 0), STEPS)
    for one, other in zip(got, whole, strict=True):
        assert one["scalars"] == pytest.approx(other["scalars"], rel=tolerance)
        for tensor, value in one["tensors"].items():
            torch.testing.assert_close(value, other["tensors"][tensor], rtol=0, atol=1e3 * tolerance, msg=tensor)
    largest = 16 if name == "weight passes" else 6 if case["sequence_parallel"] else 7
    assert max(one["rows"] for one in got) == largest * batch
    assert max(one["rows"] for one in whole) == SEQUENCE * batch


class Head:
    """A linear head on one rank, its loss, and the bucket that its weight is completed in."""

    def __init__(self, trainable: bool = True):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(10, 3, 8, dtype=torch.float64, generator=generator).requires_grad_()
        self.targets = torch.randint(13, (10, 3), generator=generator)
        self.weights = torch.randn(10, 3, dtype=torch.float64, generator=generator)
        queue, tp = WeightGradQueue(), Mesh(Layout()).tp
        value = torch.randn(13, 8, dtype=torch.float64, generator=generator).requires_grad_(trainable)
        spec = ParamSpec("head.weight", 0, (Segment("head.weight", (13, 8)),))
        self.weight = Weight(spec, value, torch.float64 if trainable else None, queue)
        self.weight.grad, self.completed = torch.full_like(value, torch.nan), []
        self.weight.bucket = self
        self.weight.begin_step(1, 1)
        self.project, self.cross_entropy = ColumnParallelLinear(self.weight, None, tp, False), CrossEntropy(tp, 13)

    def complete(self, weight: Weight, reduction: int) -> None:
        self.completed.append(reduction)

    def loss(self, part: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return self.cross_entropy(self.project(part).flatten(0, 1), targets, 0.25, weights)

    def chunked(self) -> Tensor:
        return loss_in_chunks(self.loss, self.x, self.targets, self.weight, 4, self.weights)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, and gradients of x and the weight, by torch."""
        value = self.weight.tensor.detach().clone().requires_grad_()
        losses = torch.nn.functional.cross_entropy(
            (self.x @ value.t()).flatten(0, 1), self.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        loss = 0.25 * (losses @ self.weights.flatten())
        return loss, *torch.autograd.grad(loss, (self.x, value))


@pytest.mark.parametrize("ignored", [slice(0, 0), slice(0, 5), slice(0, 10)], ids=["none", "a whole chunk", "all"])
def test_gradients_are_torchs(ignored):
    head = Head()
    head.targets[ignored] = IGNORE_INDEX
    loss = head.chunked()
    assert head.completed == [0], "three chunks are one contribution"
    loss.backward()
    for got, expected in zip((loss, head.x.grad, head.weight.grad), head.expected(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_without_gradients_only_the_loss_is_computed():
    head = Head()
    with torch.no_grad():
        loss = head.chunked()
    torch.testing.assert_close(loss, head.expected()[0].detach())
    assert head.completed == [] and head.weight.grad.isnan().all()


def test_what_is_frozen_gets_no_gradient():
    head = Head(trainable=False)
    head.chunked().backward()
    torch.testing.assert_close(head.x.grad, head.expected()[1])
    assert head.completed == [] and head.weight.grad.isnan().all()
    head = Head()
    expected = head.expected()
    head.x.requires_grad_(False)
    head.chunked().backward()
    assert head.x.grad is None
    torch.testing.assert_close(head.weight.grad, expected[2])


def test_backward_runs_once_from_a_gradient_of_one():
    head = Head()
    loss = head.chunked()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="scale the loss instead"):
        (2 * Head().chunked()).backward()
    head = Head()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(head.chunked(), head.x, create_graph=True)

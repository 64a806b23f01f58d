"""A kind of block that a test defines (`tests.support.short_convolution`) is trained, planned, recomputed, generated
with, saved and resumed in every layout like the kinds that megalite has, and no line of megalite knows it.

Layers of a gated convolution alternate with attention. An independent computation of the convolution checks the kind
itself; the rest checks that rooms ask blocks and know none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megalite.config.load import from_dict
from megalite.generation.language_model import LanguageModel, Sampling
from megalite.model.cost.flops import per_token
from megalite.model.parameters import model_specs
from megalite.parallel.spec import parameter_count
from megalite.planner.memory.estimate import estimate
from tests.distributed.test_equivalence import assert_same_run
from tests.support import short_convolution
from tests.support.configs import SEQUENCE, case_of, config_of, config_of_one_process, micro_batch, write_tokens
from tests.support.pool import RankContext
from tests.support.short_convolution import KIND, WIDTH, ShortConvolutionKind

STEPS = 3
LAYERS = [f"{KIND}+feed_forward", "attention+feed_forward", f"{KIND}+feed_forward", f"{KIND}+feed_forward"]
ORDERS = ["feed_forward+attention", KIND, "feed_forward", f"feed_forward+{KIND}"]
BASE = case_of(tied=False, kv_heads=2, vocab_size=96, layers=4, masked=True, dropout=0.1, precision="fp64") | {
    "microbatches": 4
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, split sequence": {"tp": 2, "sequence_parallel": True},
    "pp 2, zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp 2, interleaved": {"pp": 2, "schedule": "interleaved"},
    "dp 2, zero 3": {"dp": 2, "zero": 3},
    "tp 2, pp 2, dp 2, zero 2": {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "sequence_parallel": True},
    "its operation and others, recomputed": {"tp": 2, "sequence_parallel": True, "recompute": "convolution+residual"},
    "recomputed within a budget": {"recompute": "budget"},
    "full, recomputed": {"pp": 2, "recompute": "full"},
    "muon, dp 2": {"dp": 2, "optimizer": "muon"},
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """The kind, in pytest's own process only while these tests run."""
    with short_convolution.registered(ShortConvolutionKind()):
        yield


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("data"), 96)


def configs(prefix: str, **layout: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout's configuration, and that of the same model, data and global batch on one process."""
    case, model = {**BASE, **layout}, {"layer_blocks": LAYERS, "initializer_range": 0.2}
    several, one = config_of(case, prefix, "fp64", model=model), config_of_one_process(case, prefix)
    one["model"] |= model
    return several, one


def world(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_like_one_process(name, ranks, references, prefix):
    several, one = configs(prefix, **LAYOUTS[name])
    got = ranks.run(world(LAYOUTS[name]), short_convolution.train, several, STEPS)
    assert_same_run(got, references.run(short_convolution.train, one, STEPS), 1e-9, 1e-9)


@pytest.mark.parametrize(
    "recompute", ["none", "residual+attn_norm+mlp_norm+attn_out", "mlp_in+mlp_out+convolution+qkv+attention", "full"]
)
@pytest.mark.parametrize("parallel", ["none", "two_norms"])
def test_blocks_of_a_layer_may_be_of_any_number_and_order(recompute, parallel, ranks, references, prefix):
    several, one = configs(prefix, tp=2, sequence_parallel=True, recompute=recompute)
    for config in (several, one):
        config["model"] |= {"layer_blocks": ORDERS, "parallel_block": parallel}
    got = ranks.run(2, short_convolution.train, several, 2)
    assert_same_run(got, references.run(short_convolution.train, one, 2), 1e-9, 1e-9)


def test_its_matrices_have_adapters(ranks, references, prefix):
    several, one = configs(prefix, tp=2, sequence_parallel=True)
    for config in (several, one):
        config["lora"] = {"rank": 2, "targets": ["conv_gate", "conv_out", "q"]}
    got = ranks.run(2, short_convolution.train, several, 2)
    assert_same_run(got, references.run(short_convolution.train, one, 2), 1e-9, 1e-9)
    assert got[0]["tensors"]["weight/layers.0.attention.conv_gate.lora_b"].abs().max() > 0


def test_gradients_are_those_of_autograd():
    """The convolution with its hand-written backward, against torch's, with and without documents."""
    torch.manual_seed(0)
    packed = torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([[0, 0, 0, 0, 4, 4, 6, 6, 6], [0, 1, 1, 1, 1, 1, 1, 7, 7]]).t()
    for first in (None, starts):
        gate, value = packed.chunk(2, -1)
        rows = []
        for position in range(9):
            total = torch.zeros(2, 4, dtype=torch.float64)
            for by in range(WIDTH):
                for row in range(2):
                    if position - by >= (0 if first is None else first[position, row]):
                        total[row] = total[row] + value[position - by, row] * taps[:, WIDTH - 1 - by]
            rows.append(total)
        expected = gate * torch.stack(rows)
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, (packed, taps), grad)
        weight = _Taps(taps.detach())
        out = short_convolution._GatedConvolution.apply(packed, weight, first)
        assert out.allclose(expected, rtol=0, atol=1e-12)
        (got,) = torch.autograd.grad(out, packed, grad)
        assert got.allclose(wanted[0], rtol=0, atol=1e-12)
        assert weight.grad is not None and weight.grad.allclose(wanted[1], rtol=0, atol=1e-12)


class _Taps:
    trainable = True

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.grad = tensor, None

    def accumulate(self, grad: torch.Tensor) -> None:
        self.grad = grad


MEMORY = {"dropout": 0.0, "masked": False, "vocab_size": 104}  # logits that no other tensor is as large as


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_what_autograd_keeps(recompute, prefix):
    """To the byte."""
    config, _ = configs(prefix, recompute=recompute, **MEMORY)
    parsed = from_dict(config)
    (planned,) = estimate(parsed, 1, "cpu")
    assert (planned.activations, planned.logits) == short_convolution.most_kept(RankContext(0, 1), config)


def test_its_operation_frees_its_output(prefix):
    """Of three layers at the peak, which is at the head, in fp64."""
    kept, dropped = (
        estimate(from_dict(configs(prefix, recompute=recompute, **MEMORY)[0]), 1, "cpu")[0].activations
        for recompute in ("none", "convolution")
    )
    output = micro_batch(BASE) * SEQUENCE * 32 * 8
    assert kept - dropped == 3 * output


@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2, "schedule": "zb-h1"}], ids=str)
def test_activations_are_what_autograd_keeps_on_two_ranks(layout, ranks, prefix):
    config, _ = configs(prefix, **MEMORY, **layout)
    planned = [(each.activations, each.logits) for each in estimate(from_dict(config), 2, "cpu") for _ in each.ranks]
    assert planned == ranks.run(2, short_convolution.most_kept, config)


def test_parameters_and_flops_are_counted(prefix):
    model = from_dict(configs(prefix)[0]).model
    hidden, kinds = model.hidden_size, {}
    for spec in model_specs(model):
        layer = spec.name.split(".")[1]
        if ".attention." in spec.name:
            kinds[layer] = kinds.get(layer, 0) + parameter_count([spec])
    assert kinds == {
        "0": hidden * (3 * hidden + WIDTH),
        "1": 2 * hidden**2 + hidden**2,
        "2": kinds["0"],
        "3": kinds["0"],
    }
    flops, feed_forward = per_token(model, SEQUENCE), 3 * hidden * model.intermediate_size
    assert flops.layers == 6 * (3 * 3 * hidden**2 + 3 * hidden**2 + 4 * feed_forward)


def test_generates_from_what_rows_keep_in_every_layout(ranks, prefix):
    """Prompts of unequal lengths, one shorter than the convolution; tokens and logits are those without a cache."""
    config, _ = configs(prefix)
    config["run"]["name"] = "generate"
    saved = short_convolution.train_and_save(RankContext(0, 1), config, 2, 0)["directory"]
    prompts, count = [[5, 3], [7, 11, 13, 17, 19], [3, 2, 9]], 6
    model = LanguageModel(saved, precision="fp64")
    cache = model.new_cache(3, SEQUENCE)
    logits, rows = model.read(cache, prompts), [list(prompt) for prompt in prompts]
    for step in range(count):
        whole = model.logits(rows)
        assert logits is not None and whole is not None
        for row, tokens in enumerate(rows):
            assert logits[row].allclose(whole[len(tokens) - 1, row], rtol=0, atol=1e-12)
            tokens.append((step * 7 + row) % 90)
        logits = model.extend(cache, [tokens[-1] for tokens in rows], [len(tokens) - 1 for tokens in rows])
    alone = short_convolution.continued(RankContext(0, 1), [saved], {}, prompts, count)
    greedy = LanguageModel(saved).continuations(prompts, count, Sampling(0.0))
    assert alone[0]["greedy"] == list(greedy)
    for layout in ({"tp": 2}, {"pp": 2}):
        for (result,) in ranks.run(2, short_convolution.continued, [saved], layout, prompts, count):
            assert result["greedy"] == alone[0]["greedy"] and result["drawn"] == alone[0]["drawn"]


def test_is_saved_and_resumed_on_another_layout(ranks, references, prefix):
    several, one = configs(prefix, tp=2, sequence_parallel=True)
    several["run"]["name"] = "resumed"
    whole = references.run(short_convolution.train, one, STEPS)
    saved = ranks.run(2, short_convolution.train_and_save, several, 2, 0)[0]["directory"]
    other, _ = configs(prefix, pp=2, dp=2, zero=3)
    other["checkpoint"]["load"] = saved
    got = ranks.run(4, short_convolution.resume, other, STEPS - 2, ("weight",))
    assert got[0]["losses"] == pytest.approx(whole["losses"][2:], rel=1e-9, abs=0)
    for name, tensor in got[0]["tensors"].items():
        assert (tensor - whole["tensors"][name]).abs().max() <= 1e-9

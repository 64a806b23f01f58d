"""Elementwise optimizers against their definitions in fp64, and moments in bf16 and 8 bits against bitsandbytes and the
definition of stochastic rounding."""

from __future__ import annotations

from math import exp, log, nan, sqrt
from typing import Any

import pytest
import torch
from megalite_kernels import moments
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.config.extensions import EXTENSIONS, load_extensions
from megalite.config.load import from_dict
from megalite.config.sections.ademamix import AdEMAMixConfig
from megalite.config.sections.optimizer import NAMES, OptimizerConfig
from megalite.mesh.layout import AxisPlace, Coordinates
from megalite.mesh.mesh import Layout, Mesh
from megalite.optimizer.ademamix import AdEMAMix
from megalite.optimizer.registry import OPTIMIZERS, Optimizer, alignment, create, kinds_of
from megalite.optimizer.state import OptimizerState
from megalite.optimizer.state_tensors import block_of, check_blocks
from megalite.parallel.sharding.store import ParameterStore, StoreOptions
from megalite.parallel.spec import ParamSpec, Segment
from megalite.training.optimizer_trial import try_optimizer
from tests.support import own_optimizer

SHAPE = (16, 256)
LR, DECAY, EPS = 0.01, 0.3, 1e-8


def made(name: str, moments: str = "fp32", dtype: torch.dtype = torch.float32, **sections: Any) -> Optimizer:
    """The optimizer of one matrix, whose weights are drawn."""
    given = {"name": name, "moments": moments, "lr": LR, "weight_decay": DECAY, "eps": EPS, "betas": [0.9, 0.98]}
    config = from_dict({"optimizer": given, **sections})
    specs = [ParamSpec("w", 0, (Segment("w", SHAPE, init_std=0.1),))]
    store = ParameterStore(specs, Mesh(Layout()), StoreOptions(dtype=dtype, pad=alignment(config)))
    store.initialize(1)
    return create(config, OptimizerState(store, kinds_of(config), seed=5))


def given(optimizer: Optimizer, step: int) -> Tensor:
    """Set the gradient of a step, and return it."""
    generator = torch.Generator().manual_seed(step)
    grads = torch.randn(SHAPE, generator=generator) * torch.rand(SHAPE, generator=generator) ** 3
    (weight,) = optimizer.state.store.weights.values()
    weight.grad.copy_(grads)
    return grads


def weights(optimizer: Optimizer) -> Tensor:
    (weight,) = optimizer.state.store.weights.values()
    return weight.tensor.detach()


def tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    (span,) = optimizer.state.spans()
    return span.state


# ---- definitions


def lion(p: Tensor, g: Tensor, s: dict[str, Tensor], t: int) -> Tensor:
    m = s.setdefault("exp_avg", torch.zeros_like(p))
    s["exp_avg"] = 0.98 * m + 0.02 * g
    return p - LR * (torch.sign(0.9 * m + 0.1 * g) + DECAY * p)


WARMUP = 6


def ademamix(p: Tensor, g: Tensor, s: dict[str, Tensor], t: int) -> Tensor:
    zero = torch.zeros_like(p)
    share = min(t / WARMUP, 1)
    alpha, beta3 = 4.0 * share, exp(log(0.9) * log(0.99) / ((1 - share) * log(0.99) + share * log(0.9)))
    s["exp_avg"] = 0.9 * s.get("exp_avg", zero) + 0.1 * g
    s["exp_avg_slow"] = beta3 * s.get("exp_avg_slow", zero) + (1 - beta3) * g
    s["exp_avg_sq"] = 0.98 * s.get("exp_avg_sq", zero) + 0.02 * g * g
    root = (s["exp_avg_sq"] / (1 - 0.98**t)).sqrt() + EPS
    return p - LR * ((s["exp_avg"] / (1 - 0.9**t) + alpha * s["exp_avg_slow"]) / root + DECAY * p)


SLOW = {"alpha": 4.0, "beta3": 0.99, "schedule_steps": WARMUP}


@pytest.mark.parametrize("name, definition", [("lion", lion), ("ademamix", ademamix)])
def test_updates_are_those_of_the_definition(name, definition):
    """A step with a divisor divides gradients, and one that is skipped changes nothing."""
    optimizer = made(name, dtype=torch.float64, ademamix=SLOW)
    expected, state = weights(optimizer).clone(), dict[str, Tensor]()
    for step in range(1, 9):
        grads = given(optimizer, step).double()
        if step == 4:
            before = [each.clone() for each in optimizer.state.changing()]
            optimizer.step(step, LR, torch.tensor(nan))
            assert all(map(torch.equal, optimizer.state.changing(), before))
        optimizer.step(step, LR, torch.tensor(2.0) if step == 5 else None)
        expected = definition(expected, grads / 2 if step == 5 else grads, state, step)
        torch.testing.assert_close(weights(optimizer), expected, rtol=1e-12, atol=1e-13)
        for kind, value in state.items():
            torch.testing.assert_close(tensors(optimizer)[kind].view(SHAPE), value, rtol=1e-12, atol=1e-15)


def test_the_half_life_of_the_slow_average_rises_linearly():
    options = OptimizerConfig(betas=[0.9, 0.999])
    schedules = [
        AdEMAMix(options, AdEMAMixConfig(8.0, 0.9999, 1000)).schedules(step) for step in (250, 500, 1000, 2000)
    ]
    assert [alpha for alpha, _ in schedules] == [2.0, 4.0, 8.0, 8.0]
    lives = [log(0.5) / log(beta) for beta in (0.9, *(beta3 for _, beta3 in schedules))]
    rise = lives[3] - lives[0]
    assert lives[1:4] == pytest.approx([lives[0] + rise / 4, lives[0] + rise / 2, lives[3]], rel=1e-9)
    assert schedules[2][1] == schedules[3][1] == pytest.approx(0.9999)


# ---- moments in 8 bits


def test_8_bits_are_those_of_bitsandbytes():
    """From the same state, a step has the same weights and scales. Where a code differs, ours is nearer."""
    import bitsandbytes

    optimizer = made("adamw", "8bit")
    parameter = torch.nn.Parameter(weights(optimizer).clone())
    theirs = bitsandbytes.optim.AdamW8bit([parameter], lr=LR, betas=(0.9, 0.98), weight_decay=DECAY, min_8bit_size=1)
    for step in range(1, 6):
        parameter.grad = given(optimizer, step)
        before = decoded(optimizer)
        optimizer.step(step, LR, None)
        theirs.step()
        torch.testing.assert_close(weights(optimizer), parameter.detach(), rtol=2e-6, atol=1e-6)
        weights(optimizer).copy_(parameter.detach())
        grads, ours, state = parameter.grad.view(-1), decoded(optimizer), theirs.state[parameter]
        for kind, number, beta in (("exp_avg", 1, 0.9), ("exp_avg_sq", 2, 0.98)):
            assert torch.equal(state[f"qmap{number}"], moments.code_table(number == 1, grads.device))
            codes, scales = tensors(optimizer)[kind], tensors(optimizer)[f"{kind}.absmax"]
            torch.testing.assert_close(scales, state[f"absmax{number}"], rtol=1e-6, atol=0)
            exact = before[kind].lerp(grads**number, 1 - beta)
            codes.copy_(state[f"state{number}"].view(-1))
            scales.copy_(state[f"absmax{number}"])  # the next step starts from their state
            error, other = (ours[kind] - exact).abs(), (decoded(optimizer)[kind] - exact).abs()
            raised = (ours[kind] > exact) & (other == exact)  # to the smallest number, instead of 0
            assert (error <= other + 1e-6 * exact.abs().amax())[~raised].all()


def decoded(optimizer: Optimizer) -> dict[str, Tensor]:
    kept = tensors(optimizer)
    return {
        kind: moments.decode(kept[kind], kept[f"{kind}.absmax"], not kind.endswith("_sq"))
        for kind in ("exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_of_the_nearest_numbers(signed):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(64, 256, generator=generator) * 10 ** (torch.rand(64, 256, generator=generator) * 8 - 9)
    values[0] = 0
    values = values if signed else values.square()
    codes, scales = moments.encode(values.view(-1), 64, signed)
    assert torch.equal(scales, values.abs().amax(1))
    table = moments.code_table(signed, values.device)
    units = values / scales.clamp(min=1e-38).unsqueeze(1)
    nearest = (units.double().unsqueeze(2) - table.double()).abs().amin(2).float()
    chosen = (table[codes.int()].view(64, 256) - units).abs()
    raised = (codes.view(64, 256) == 1) & (units < table[1]) & ~torch.tensor(signed)
    torch.testing.assert_close(chosen[~raised], nearest[~raised], rtol=1e-5, atol=1e-9)
    decoded = moments.decode(codes, scales, signed).view(64, 256)
    assert torch.equal(decoded == 0, values == 0) or signed
    assert not decoded[0].any()


@pytest.mark.parametrize(
    "segment, block",
    [
        (Segment("", (8, 4096)), 256),
        (Segment("", (4096, 14336), 1), 256),
        (Segment("", (4096, 11008), 1), 32),
        (Segment("", (8, 96)), 32),
        (Segment("", (8, 48)), 0),
        (Segment("", (8, 128), 1), 0),
        (Segment("", (4096,)), 0),
    ],
)
def test_blocks_are_of_whole_parts_of_rows(segment, block):
    assert block_of(segment) == block
    ways = [Coordinates({"tp": AxisPlace(0, size)}) for size in (1, 2, 4, 8)]
    for at in ways:
        check_blocks([ParamSpec("", 0, (segment,))], at)


def test_a_layout_that_cuts_blocks_is_rejected():
    spec = ParamSpec("", 0, (Segment("layers.0.mlp.down_proj.weight", (64, 256), 1),))
    with pytest.raises(ConfigError, match=r"moments = 8bit .* parallel.tp = 16: 16 columns .* blocks of 32.* bf16"):
        check_blocks([spec], Coordinates({"tp": AxisPlace(0, 16)}))


# ---- moments in bf16


def test_stochastic_rounding_is_exact_in_the_mean():
    """Every value becomes one of its two neighbours; over seeds, steps and kinds the mean is the value."""
    values = torch.tensor([1.001, -3.14159, 2.0**-30 * 1.0039, 0.0, 1.0])
    low = (values.view(torch.int32) & -0x10000).view(torch.float32)
    high = torch.where(low == values, low, (low.view(torch.int32) + 0x10000).view(torch.float32))
    draws = []
    for draw in range(4000):
        bits = moments.random_bits(moments.rounding_key(draw % 10, draw // 10, 1), 7, torch.arange(len(values)))
        draws.append(moments.stochastic_bf16(values, bits).float())
    rounded = torch.stack(draws)
    assert ((rounded == low) | (rounded == high)).all()
    step = (high - low).abs().double()
    error = (rounded.double().mean(0) - values.double()).abs()
    assert (error <= 4.5 * 0.5 * step / sqrt(4000)).all(), error / step


def test_random_bits_depend_on_every_part_and_are_even():
    indices = torch.arange(1 << 16)
    base = moments.random_bits(moments.rounding_key(1, 2, 0), 3, indices)
    others = [
        moments.random_bits(moments.rounding_key(*key), tensor, indices + shift)
        for key, tensor, shift in (
            *(((2, 2, 0), 3, 0), ((1, 3, 0), 3, 0), ((1, 2, 1), 3, 0)),
            *(((1, 2, 0), 4, 0), ((1, 2, 0), 3, 1), ((1, 2, 0), 3, 1 << 33)),
        )
    ]
    for other in others:
        low = torch.stack([(base & 0xFFFF).double(), (other & 0xFFFF).double()])
        assert torch.corrcoef(low)[0, 1].abs() < 0.02
    for bit in range(32):
        assert abs(((base >> bit) & 1).double().mean().item() - 0.5) < 0.01


def test_moments_in_bf16_follow_changes_below_their_spacing():
    """A second moment with a beta of 0.999 falls, which rounding to the nearest would prevent."""
    optimizer = made("adamw", "bf16")
    optimizer.rule.options.betas[1] = 0.999
    given(optimizer, 1)
    optimizer.step(1, 0.0, None)
    before = tensors(optimizer)["exp_avg_sq"].float()
    for step in range(2, 302):
        for weight in optimizer.state.store.weights.values():
            weight.grad.zero_()
        optimizer.step(step, 0.0, None)
    after = tensors(optimizer)["exp_avg_sq"].float()
    ratio = (after.double().sum() / before.double().sum()).item()
    assert ratio == pytest.approx(0.999**300, rel=0.01)


# ---- an optimizer of the user


def written(tmp_path, body: str, head: str = 'state = ("exp_avg",)', base: str = "UpdateRule") -> str:
    file = tmp_path / "own.py"
    lines = ["from megalite.optimizer.update_rule import UpdateRule", "", "", f"class Own({base}):", f"    {head}"]
    lines += [
        "    def update(self, weights, grads, state, step):" if body else "",
        *(f"        {b}" for b in body.split("; ")),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    EXTENSIONS.files.clear()
    return f"{file}:Own"


WRONG = {
    "update": ("", 'state = ("exp_avg",)', "UpdateRule", "Own does not define update. Add it."),
    "base": ("pass", "state = ()", "object", "Own is not a class that is derived from megalite.optimizer.update_rule"),
    "state": ("pass", 'state = "exp_avg"', "UpdateRule", "Own.state is 'exp_avg'. Set it to the names"),
    "taken": ("pass", 'state = ("weight",)', "UpdateRule", "has weight, a name that is taken"),
    "no effect": ("weights = weights - grads", "state = ()", "UpdateRule", "does not change the weights"),
    "not elementwise": ("weights.sub_(grads / grads.norm())", "state = ()", "UpdateRule", "is not elementwise"),
    "replaced": (
        'state["exp_avg"] = state["exp_avg"] + grads; weights.sub_(state["exp_avg"])',
        'state = ("exp_avg",)',
        "UpdateRule",
        "replaces state['exp_avg'], which is then lost",
    ),
    "shape": (
        'weights.sub_(grads); state["exp_avg"].resize_(4)',
        'state = ("exp_avg",)',
        "UpdateRule",
        "must keep the shape of the weights, but has [4] instead of [64]",
    ),
    "negative": (
        'state["a_sq"].add_(grads); weights.sub_(grads)',
        'state = ("a_sq",)',
        "UpdateRule",
        "a_sq is negative, but a name that ends in _sq",
    ),
    "gradients": ("weights.sub_(grads.mul_(0.1))", "state = ()", "UpdateRule", "changes the gradients"),
    "fails": ('weights.sub_(state["m"])', "state = ()", "UpdateRule", "fails on made-up gradients: KeyError: 'm' at"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_an_own_optimizer_is_one_message(wrong, tmp_path):
    body, head, base, message = WRONG[wrong]
    name = written(tmp_path, body, head, base)
    with pytest.raises(ConfigError) as caught:
        try_optimizer(from_dict({"optimizer": {"name": name}}))
    assert str(caught.value).startswith(f"optimizer.name = {name}: ") and message in str(caught.value)


def test_the_manuals_optimizer_is_accepted_by_name_and_by_file(tmp_path):
    name = own_optimizer.write(tmp_path)
    try_optimizer(from_dict({"optimizer": {"name": name}}))
    file = tmp_path / "registered.py"
    text = (tmp_path / "my_optimizer.py").read_text(encoding="utf-8")
    decorated = text.replace("class AdaBelief", '@optimizer("adabelief")\nclass AdaBelief')
    file.write_text(f"from megalite.config.extensions import optimizer\n{decorated}", encoding="utf-8")
    try:
        load_extensions([str(file)])
        config = from_dict({"optimizer": {"name": "adabelief", "moments": "8bit"}, "model": {"vocab_size": 64}})
        try_optimizer(config)
        names = [each.name for each in kinds_of(config)(Segment("w", SHAPE))]
        assert names == ["exp_avg", "exp_avg.absmax", "distance_sq", "distance_sq.absmax"]
    finally:
        EXTENSIONS.files.clear()
        EXTENSIONS.optimizers.clear()


def test_the_table_is_what_the_options_say():
    assert tuple(OPTIMIZERS) == NAMES
    for name, entry in OPTIMIZERS.items():
        if name != "muon":
            rule = create(from_dict({"optimizer": {"name": name, "moments": "bf16"}}), made(name, "bf16").state).rule
            assert rule.state == entry.kinds(Segment("w", SHAPE))

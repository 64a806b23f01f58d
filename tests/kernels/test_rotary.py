import pytest
import torch
from megalite_kernels.rotary import rotary_tables, rotate, split_rotary, split_rotary_backward

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
    "attention_factor": 1.1,
}
STEEP = {**YARN, "beta_fast": 1, "beta_slow": 1}  # one channel in the transition
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "steep yarn": STEEP,
}


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_and_rotation_are_those_of_transformers(name):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    scaling = SCALINGS[name]
    parameters = {"rope_theta": 5e5, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=4, head_dim=24, max_position_embeddings=512, rope_parameters=parameters
    )
    positions = torch.stack((torch.arange(300), torch.arange(300) % 70))  # [B, S]: the second row restarts
    q = torch.randn(2, 4, 300, 24)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    rotated, _ = apply_rotary_pos_emb(q, q, cos, sin)
    ours = rotary_tables(positions.T, 24, 5e5, scaling, torch.float32, "cpu")  # [S, B, 1, D]
    signed = torch.cat((-sin[..., :12], sin[..., 12:]), -1)
    expected = [table.transpose(0, 1).unsqueeze(2) for table in (cos, signed)]
    torch.testing.assert_close(ours, tuple(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(q.permute(2, 0, 1, 3), *ours), rotated.permute(2, 0, 1, 3))
    plain = rotary_tables(positions[0], 24, 5e5, scaling, torch.float32, "cpu")  # [S, 1, 1, D]
    torch.testing.assert_close(plain, tuple(table[:, :1] for table in expected), rtol=0, atol=1e-6)


def test_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="rope_scaling.*proportional"):
        rotary_tables(torch.arange(4), 8, 1e4, {"rope_type": "proportional", "factor": 2.0}, torch.float32, "cpu")


@pytest.mark.parametrize("hq, hk", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("sequence", [9, 1, 0])
def test_split_is_the_rotation_of_each_part_and_backward_its_transpose(hq, hk, per_sample, sequence):
    batch, dim = 3, 6
    positions = torch.randint(0, 50, (sequence, batch) if per_sample else (sequence,))
    cos, sin = rotary_tables(positions, dim, 1e4, None, torch.float64, "cpu")
    packed = torch.randn(sequence, batch, (hq + 2 * hk) * dim, dtype=torch.float64, requires_grad=True)

    def by_pairs(x):  # the definition, as a complex product
        angle = positions.double().view(sequence, batch if per_sample else 1, 1, 1) / 1e4 ** (
            torch.arange(0, dim, 2).double() / dim
        )
        turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), -1)

    q, k, v = packed.split([hq * dim, hk * dim, hk * dim], -1)
    expected = by_pairs(q.unflatten(-1, (hq, dim))), by_pairs(k.unflatten(-1, (hk, dim))), v.unflatten(-1, (hk, dim))
    parts = split_rotary(packed.detach(), hq, hk, dim, cos, sin)
    torch.testing.assert_close(parts, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.randn_like(part) for part in parts]
    grads[1] = grads[1].transpose(0, 1).contiguous().transpose(0, 1)  # any strides
    (dpacked,) = torch.autograd.grad(expected, packed, grads)
    torch.testing.assert_close(split_rotary_backward(*grads, cos, sin), dpacked, rtol=1e-12, atol=1e-12)
    without = split_rotary(packed.detach(), hq, hk, dim, None, None)
    torch.testing.assert_close(split_rotary_backward(*without, None, None), packed.detach(), rtol=0, atol=0)


def test_rotating_back_restores():
    x = torch.randn(8, 2, 3, 16, dtype=torch.float64)
    cos, sin = rotary_tables(torch.arange(8), 16, 1e4, None, torch.float64, "cpu")
    torch.testing.assert_close(rotate(rotate(x, cos, sin), cos, sin, inverse=True), x)


def test_values_of_another_width_and_a_narrow_rest_are_split_and_packed_too():
    sequence, batch, hq, hk, dim, value_dim, rest = 5, 2, 4, 2, 6, 10, 3
    cos, sin = rotary_tables(torch.arange(sequence), dim, 1e4, None, torch.float64, "cpu")
    widths = [hq * dim, hk * dim, hk * value_dim, rest]
    packed = torch.randn(sequence, batch, sum(widths), dtype=torch.float64, requires_grad=True)
    q, k, v, gate = packed.split(widths, -1)
    expected = *(rotate(x.unflatten(-1, (-1, dim)).clone(), cos, sin) for x in (q.detach(), k.detach())), v
    for disposable in (False, True):
        parts = split_rotary(packed.detach().clone(), hq, hk, dim, cos, sin, disposable, value_dim)
        for part, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(part.flatten(-2), wanted.flatten(2), rtol=0, atol=0)
    grads = [torch.randn_like(part) for part in parts]
    dpacked = split_rotary_backward(*grads, cos, sin, torch.ones_like(gate))
    back = [rotate(grad, cos, sin, inverse=True) for grad in grads[:2]]
    wanted = torch.cat((*(each.flatten(-2) for each in (*back, grads[2])), torch.ones_like(gate)), -1)
    torch.testing.assert_close(dpacked, wanted, rtol=0, atol=0)
    plain = split_rotary(packed.detach(), hq, hk, dim, None, None, value_dim=value_dim)
    torch.testing.assert_close(
        split_rotary_backward(*plain, None, None, gate.detach()), packed.detach(), rtol=0, atol=0
    )

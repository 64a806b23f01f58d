import pytest
import torch
from megalite_kernels.dropout import AttentionDropout, column_hash, dropout, dropout_key, keep_mask, row_hash

KEY = dropout_key(seed=1, step=2, site=3, layer=4)
MASK32 = 0xFFFFFFFF


def reference_keep(key: int, sample: int, position: int, channel: int, p: float) -> bool:
    """The module's hash in plain Python integers: what any other backend must reproduce."""

    def signed(h):
        h &= MASK32
        return h - (1 << 32) if h >> 31 else h

    def shift_add(h):
        return (h + (signed(h) >> 16)) & MASK32

    def mix(h):
        for factor in (0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9):
            h = shift_add(h * factor & MASK32)
        return h

    folded = mix(((sample + (sample >> 32) * 0x297A2D39) ^ key) & MASK32)
    row = mix((position * 0x1B56C4E9 + folded) & MASK32)
    column = mix((channel * 0x1B56C4E9 + 0x2C1B3C6D) & MASK32)
    h = shift_add((row ^ column) * 0x2C1B3C6D & MASK32) * 0x297A2D39
    return signed(h) < min(round((1 - p) * 2**32) - 2**31, 2**31 - 1)


def test_bits_are_those_of_plain_integers():
    samples, positions, channels = (
        torch.tensor([0, 5, 2**31 + 3, 2**40 + 17]),
        torch.tensor([0, 1, 70_000]),
        torch.arange(50),
    )
    keep = keep_mask(row_hash(KEY, samples, positions), channels.int(), 0.3) != 0
    for s, position in enumerate(positions.tolist()):
        for b, sample in enumerate(samples.tolist()):
            assert keep[s, b].tolist() == [reference_keep(KEY, sample, position, c, 0.3) for c in channels.tolist()]


def test_every_part_of_the_key_changes_the_mask():
    keys = {
        dropout_key(*words)
        for words in ((1, 2, 3, 4), (2, 1, 3, 4), (1, 2, 4, 3), (1, 2, 3, 5), (1, 3, 3, 4), (0, 0, 0, 0))
    }
    assert len(keys) == 6 and all(-(2**31) <= key < 2**31 for key in keys)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_look_random(p):
    samples, positions, channels = torch.arange(16), torch.arange(128), torch.arange(256, dtype=torch.int32)
    rows = row_hash(KEY, samples, positions)
    keep = (keep_mask(rows, channels, p) != 0).double()
    noise = 1 / keep.numel() ** 0.5
    assert abs(keep.mean() - (1 - p)) < 4 * noise * (p * (1 - p)) ** 0.5
    for dim, size in enumerate(keep.shape):  # no row, sample or channel is special
        means = keep.mean([d for d in range(3) if d != dim])
        assert (means - (1 - p)).abs().max() < 5.5 * (p * (1 - p) * size / keep.numel()) ** 0.5
    centred = (keep - (1 - p)) / (p * (1 - p)) ** 0.5
    step = (keep_mask(row_hash(dropout_key(1, 3, 3, 4), samples, positions), channels, p) != 0).double()
    neighbours = [centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[:, :, 1:] * centred[:, :, :-1]]
    neighbours += [centred[:, :, 64:] * centred[:, :, :-64], centred * (step - (1 - p)) / (p * (1 - p)) ** 0.5]
    # products of hashes fail here
    neighbours.append(centred[1:, :, 1:] * centred[:-1, :, 1:] * centred[1:, :, :-1] * centred[:-1, :, :-1])
    for product in neighbours:
        assert abs(product.mean()) < 4.5 * noise


def test_mask_is_independent_of_how_the_work_is_split():
    samples, positions = torch.arange(40, 44), torch.arange(6)
    x = torch.randn(6, 4, 10)
    whole = dropout(x, KEY, samples, positions, 0.4)
    assert 0 < (whole == 0).sum() < x.numel()
    torch.testing.assert_close(whole[whole != 0], x[whole != 0] / 0.6)
    assert torch.equal(dropout(x[2:5], KEY, samples, positions[2:5], 0.4), whole[2:5])  # sequence parallel
    assert torch.equal(dropout(x[:, [3, 1]], KEY, samples[[3, 1]], positions, 0.4), whole[:, [3, 1]])  # another batch
    own = torch.stack((positions, positions.flip(0)), 1)  # of each row
    rows = dropout(x[:, :2], KEY, samples[[2, 2]], own, 0.4) != 0
    assert torch.equal(rows[:, 0], rows[:, 1].flip(0)) and torch.equal(rows[:, 0], whole[:, 2] != 0)
    # tensor parallel
    assert torch.equal(dropout(x[..., 4:9], KEY, samples, positions, 0.4, channel_offset=4), whole[..., 4:9])
    assert dropout(x, KEY, samples, positions, 0.0) is x
    with pytest.raises(ValueError, match="1.0"):
        dropout(x, KEY, samples, positions, 1.0)


def test_attention_mask_is_independent_of_how_the_work_is_split():
    samples = torch.tensor([9, 4])
    whole = AttentionDropout(KEY, samples, 0.3).scale(4, range(20), range(20), torch.float32)
    part = AttentionDropout(KEY, samples[1:], 0.3, head_offset=2, position_offset=3).scale(
        2, range(2, 9), range(1, 10), torch.float32
    )
    assert torch.equal(part, whole[1:, 2:4, 5:12, 4:13])
    heads = whole.flatten(2).transpose(0, 1).flatten(1)
    assert heads.unique(dim=0).shape[0] == 4  # every head has a mask of its own
    assert column_hash(torch.arange(64), torch.arange(64).unsqueeze(1)).unique().numel() == 64 * 64

"""Kernels on tensors of more than 2³¹ elements, in a process of its own: an offset that overflows ends it.

Of a launch along one or two axes only the last programs of the first are interpreted, and only the last rows hold
values. Memory that nothing touches takes no room.
"""

import faulthandler
from unittest import mock

import torch
from megalite_kernels import (
    activation,
    adamw,
    attention,
    attention_part,
    backend,
    block_formats,
    causal_conv,
    cross_entropy,
    dropout,
    fp8,
    fp8_matmul,
    gated_norm,
    grad_norm,
    grouped_weight_grad,
    index_scores,
    nf4,
    norm,
    ordered_sum,
    permutation,
    recurrence,
    rotary,
    sparse_attention,
)
from megalite_kernels.groups import Groups
from megalite_kernels.launch import Variant
from torch import Tensor

LAST = 2  # rows that hold values


def interpret_last_programs() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.kernels.interpreter import repair

    repair()
    launch, first = Variant.launch, [0]

    def launch_last(self: Variant, grid: tuple[int, ...], *args: object) -> None:
        first[0] = grid[0] - 1 if len(grid) < 3 else 0
        launch(self, (grid[0] - first[0], *grid[1:]), *args)

    Variant.launch = launch_last
    InterpreterBuilder.set_grid_idx = lambda self, program, *others: setattr(
        self, "grid_idx", (first[0] + program, *others)
    )
    InterpreterBuilder.set_grid_dim = lambda self, programs, *others: setattr(
        self, "grid_dim", (first[0] + programs, *others)
    )


def large(rows: int, *row: int) -> Tensor:
    x = torch.empty(rows, *row, dtype=torch.bfloat16)
    x[-LAST:] = torch.randn(LAST, *row)
    return x


def end(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The last rows in float64, which goes through the references."""
    return tuple(x[-LAST:].double() for x in tensors)


def compare(computed: tuple[Tensor, ...], expected: tuple[Tensor, ...], channels: int) -> None:
    """The end of the last row: the last program of any kernel has that."""
    for one, other in zip(computed, expected, strict=True):
        torch.testing.assert_close(one[-1, ..., -channels:], other[-1, ..., -channels:].bfloat16())


def activation_triton() -> None:
    width = 2**15 + 16
    dh, gate_up = large(2**16 + 5, width), large(2**16 + 5, 2 * width)
    computed = activation.gated_forward(gate_up, "silu"), *activation.gated_backward(dh, gate_up, "silu")
    dh, gate_up = end(dh, gate_up)
    compare(
        computed,
        (activation.gated_forward(gate_up, "silu"), *activation.gated_backward(dh, gate_up, "silu")),
        channels=16,
    )


def norm_triton() -> None:
    from megalite_kernels import norm_triton

    width, programs = 8192, 2048
    # of which the last has every 2,048th row, and so the last one
    norm_triton._multiprocessors = lambda device: programs
    rows = (2**31 // width // programs + 1) * programs
    x, branch, dtotal, dy = (large(rows, width) for _ in range(4))
    weight = torch.randn(width, dtype=torch.bfloat16)
    total, y, rstd = norm.add_rms_norm(x, branch, weight, 1e-5)
    dx, _ = norm.rms_norm_backward(dy, total, weight, rstd, 0.0, dtotal)
    x, branch, dtotal, dy, exact_total, exact_rstd = end(x, branch, dtotal, dy, total, rstd)
    exact_dx, _ = norm.rms_norm_backward(dy, exact_total, weight.double(), exact_rstd, 0.0, dtotal)
    compare((total, y, dx), (*norm.add_rms_norm(x, branch, weight.double(), 1e-5)[:2], exact_dx), channels=width)


def rotary_triton() -> None:
    sequence, hq, hk, dim = 2**31 // (6 * 128) + 3, 4, 1, 128
    packed = large(sequence, 1, (hq + 2 * hk) * dim)
    cos, sin = large(sequence, 1, 1, dim), large(sequence, 1, 1, dim)
    for table, sign in ((cos, 1), (sin, -1)):
        table[-LAST:, ..., dim // 2 :] = sign * table[-LAST:, ..., : dim // 2]
    grads = large(sequence, 1, hq, dim), large(sequence, 1, hk, dim), large(sequence, 1, hk, dim)
    computed = *rotary.split_rotary(packed, hq, hk, dim, cos, sin), rotary.split_rotary_backward(*grads, cos, sin)
    packed, cos, sin, *ends = end(packed, cos, sin, *grads)
    compare(
        computed,
        (*rotary.split_rotary(packed, hq, hk, dim, cos, sin), rotary.split_rotary_backward(*ends, cos, sin)),
        channels=dim,
    )


def attention_triton() -> None:
    """Rows far apart; the results are those of rows that lie close. (A row is never nearly as wide as this in a
    model.)"""
    rows, distance = 140, 2**24 - 8
    far = torch.empty(rows * distance, dtype=torch.bfloat16).as_strided((rows, 1, 1, 16), (distance, 16, 16, 1))
    far.copy_(torch.randn(far.shape))
    near = far.contiguous()
    results = []
    for x in (far, near):
        out, saved = attention.attention(x, x, x, scale=0.25)
        results.append((out, *attention.attention_backward(near, x, x, x, out, saved, scale=0.25)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def attention_part_triton() -> None:
    """As `attention_triton`, for two runs of the rows."""
    rows, distance = 140, 2**24 - 8
    far = torch.empty(rows * distance, dtype=torch.bfloat16).as_strided((rows, 1, 1, 16), (distance, 16, 16, 1))
    far.copy_(torch.randn(far.shape))
    near, runs = far.contiguous(), [(0, 64), (128, rows - 64)]
    results = []
    for x in (far, near):
        out, lse = attention_part.attention_part(x, x, x, runs, runs, scale=0.25)
        delta = attention_part.delta(near, out)
        results.append(
            (out, lse, *attention_part.attention_part_backward(near, x, x, x, lse, delta, runs, runs, scale=0.25))
        )
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def causal_conv_triton() -> None:
    rows, width = 2**18 + 5, 2**13 + 64
    x, dout = large(rows, 1, width), large(rows, 1, width)
    for each in (x, dout):
        each[-8:] = torch.randn(8, 1, width)
    weight = torch.randn(width, 4)
    computed = causal_conv.forward(x, weight), causal_conv.backward(dout, x, weight).x
    x, dout = x[-8:].double(), dout[-8:].double()
    compare(computed, (causal_conv.forward(x, weight), causal_conv.backward(dout, x, weight).x), channels=16)


def cross_entropy_triton() -> None:
    logits, targets = large(2**16 + 5, 2**15 + 16), torch.zeros(2**16 + 5, dtype=torch.int64)
    vocabulary = logits.shape[1]
    targets[-1] = vocabulary - 3
    (exact,), last = end(logits), targets[-LAST:]
    stats, expected = (
        cross_entropy.statistics(x, t, 0, vocabulary, -100, True) for x, t in ((logits, targets), (exact, last))
    )
    lse = expected[0] + expected[1].log()
    torch.testing.assert_close(stats[0, -1] + stats[1, -1].log(), lse[-1].float())
    torch.testing.assert_close(stats[2:, -1], expected[2:, -1].float())
    both = torch.zeros(2, len(logits))
    both[0, -LAST:] = lse
    options = 1.0, 0, vocabulary, -100, 0.0, 0.0, vocabulary
    cross_entropy.gradient_(logits, targets, both, *options)
    compare((logits,), (cross_entropy.gradient_(exact, last, both[:, -LAST:].double(), *options),), channels=16)


def dropout_triton() -> None:
    width, samples, positions = 2**15 + 16, torch.tensor([3]), torch.arange(2**16 + 5)
    x = large(len(positions), 1, width)
    computed = dropout.dropout(x, 7, samples, positions, 0.1)
    compare((computed,), (dropout.dropout(x[-LAST:].double(), 7, samples, positions[-LAST:], 0.1),), channels=16)


def adamw_triton() -> None:
    """Its programs and those of the gradient norm find their elements in one table."""
    count = 2**31 + 64
    tensors = [
        large(count).to(torch.bfloat16) if narrow else torch.empty(count) for narrow in (False, True, False, False)
    ]
    for tensor in tensors:
        tensor[-LAST:] = torch.rand(LAST)
    exact = [tensor[-LAST:].double() for tensor in tensors]
    options = {"step": 3, "lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for each in (tensors, exact):
        adamw.adamw_(*([tensor] for tensor in each), **options)
    for got, expected in zip(tensors[:1] + tensors[2:], exact[:1] + exact[2:], strict=True):
        torch.testing.assert_close(got[-LAST:], expected.float())


def block_matmul_triton() -> None:
    from megalite_kernels import block_matmul_triton as kernels

    rows = 2**31 // 128 + LAST
    x, matrix = torch.empty(rows, 128).bfloat16(), torch.randn(128, 128)
    x[-LAST:] = torch.randn(LAST, 128).bfloat16()
    codes, scales = block_formats.quantize(matrix, "nf4", 64)
    read = nf4.pack(codes), scales.view(128, 2), block_formats.code_values("nf4", x.device), "nf4", 64
    values = block_formats.rounded(matrix, "nf4", 64).bfloat16().double()
    exact = x[-LAST:].double()
    for kernel, expected in (("block_matmul", exact @ values.t()), ("block_transposed_matmul", exact @ values)):
        computed = getattr(kernels, kernel)(x, *read)
        torch.testing.assert_close(computed[-LAST:].double(), expected, rtol=2**-8, atol=1e-2)


def fp8_triton() -> None:
    x = large(2**31 // 4096 + LAST, 4096)
    codes, scales = fp8.quantize(x, (1, 128))
    mx_codes, mx_scales = fp8.quantize_mx(x)
    (x,) = end(x)
    expected, mx_expected = fp8.quantize(x, (1, 128)), fp8.quantize_mx(x)
    assert torch.equal(codes[-LAST:].float(), expected.codes.float())
    assert torch.equal(scales[-LAST:], expected.scales)
    assert torch.equal(mx_codes[-1, -2048:].float(), mx_expected.codes[-1, -2048:].float())
    assert torch.equal(mx_scales[-1, -64:].float(), mx_expected.scales[-1, -64:].float())


def fp8_matmul_triton() -> None:
    rows = 2**31 // 128 + LAST
    codes, scales = torch.empty(rows, 128, dtype=torch.float8_e4m3fn), torch.ones(rows, 1)
    codes[-LAST:] = torch.randn(LAST, 128).to(codes.dtype)
    weight = fp8.quantize(torch.randn(128, 128), (128, 128))
    computed = fp8_matmul.multiply(fp8.Quantized(codes, scales), weight, torch.bfloat16)
    exact = codes[-LAST:].double() @ fp8.dequantize(weight, torch.float64).t()
    torch.testing.assert_close(computed[-LAST:].double(), exact, rtol=2**-8, atol=1e-5)


def fp8_mx_matmul_triton() -> None:
    """On a CPU, with the tile of Blackwell."""
    from megalite_kernels import fp8_mx_matmul_triton

    fp8_matmul.fp8_architecture = fp8_mx_matmul_triton.fp8_architecture = lambda device: "sm_100"
    rows = 2**31 // 128 + LAST
    codes = torch.empty(rows, 128, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    last, weight = fp8.quantize_mx(torch.randn(LAST, 128)), fp8.quantize_mx(torch.randn(16, 128))
    codes[-LAST:], scales[-LAST:] = last
    computed = fp8_matmul.multiply(fp8.Quantized(codes, scales), weight, torch.bfloat16)
    exact = fp8.dequantize(last, torch.float64) @ fp8.dequantize(weight, torch.float64).t()
    torch.testing.assert_close(computed[-LAST:].double(), exact, rtol=2**-8, atol=1e-5)


def fp8_weight_grad_triton() -> None:
    """The gradient of the last expert, of which the last tile is computed, from the last block of rows."""
    x = torch.empty(2**31 // 4096 + 128, 4096, dtype=torch.bfloat16)
    x[-128:] = torch.randn(128, 4096).bfloat16()
    (codes, scales), expected = fp8.quantize(x, (128, 1)), fp8.quantize(x[-128:], (128, 1))
    assert torch.equal(codes[-128:, -64:].float(), expected.codes[:, -64:].float())
    assert torch.equal(scales[-1, -64:], expected.scales[0, -64:])
    experts, count, height, width = 5, 2**16 + 128, 2**15 + 128, 2**14
    left, right = (
        fp8.Quantized(torch.empty(size, count, dtype=torch.float8_e4m3fn).t(), torch.ones(count // 128, size))
        for size in (height, width)
    )
    for each in (left, right):
        each.codes[-128:, -128:] = torch.randn(128, 128).to(each.codes.dtype)
    grad, groups = torch.empty(experts, height, width), Groups(torch.tensor([count - 128, *[0] * (experts - 2), 128]))
    fp8_matmul.add_transposed_products(grad, left, right, groups, overwrite=True)
    exact = left.codes[-128:, -128:].double().t() @ right.codes[-128:, -128:].double()
    torch.testing.assert_close(grad[-1, -128:, -128:].double(), exact, rtol=1e-5, atol=1e-4)


def gated_norm_triton() -> None:
    """As in `norm_triton`, with a weight for each of two groups."""
    from megalite_kernels import gated_norm_triton

    width, programs = 4096, 2048
    gated_norm_triton._multiprocessors = lambda device: 2 * programs
    rows = (2**31 // (2 * width) // programs + 1) * programs
    x, z, dy = (large(rows, 2, width) for _ in range(3))
    weight = torch.randn(2, width)
    arguments = "gate_first", 1e-5
    computed = (
        gated_norm.whole_forward(x, z, weight, *arguments, False),
        *gated_norm.whole_backward(dy, x, z, weight, *arguments)[:2],
    )
    x, z, dy = end(x, z, dy)
    expected = (
        gated_norm.whole_forward(x, z, weight.double(), *arguments, False),
        *gated_norm.whole_backward(dy, x, z, weight.double(), *arguments)[:2],
    )
    compare(computed, expected, channels=width)


def grad_norm_triton() -> None:
    x = large(2**31 + 64)
    with mock.patch.object(Tensor, "new_empty", Tensor.new_zeros):  # what the other programs would have written
        total = grad_norm.squared_sum([x])
    torch.testing.assert_close(total, x[-LAST:].double().square().sum())


def ordered_sum_triton() -> None:
    """Three parts: the last one starts beyond 2³¹ elements."""
    count = 2**30 + 64
    parts, total = torch.empty(3, count, dtype=torch.bfloat16), torch.empty(count)
    parts[:, -LAST:] = torch.randn(3, LAST)
    ordered_sum.ordered_sum(parts, total)
    torch.testing.assert_close(total[-LAST:], parts[:, -LAST:].double().sum(0).float())


def permutation_triton() -> None:
    """The last row is that of the last token."""
    count, width = 2**16 + 5, 2**15 + 16
    rows, order, weights = large(count, width), torch.arange(count), torch.zeros(count, 1)
    weights[-LAST:] = torch.rand(LAST, 1)
    (exact,), last = end(rows), weights[-LAST:].double()
    computed = permutation.gather_rows(rows, order), permutation.combine_rows(rows, order.unsqueeze(1), weights)
    compare(computed, (exact, exact * last), channels=16)
    drows, dweights = permutation.combine_rows_backward(rows, rows, order, weights)
    compare((drows,), (exact * last,), channels=16)
    torch.testing.assert_close(dweights[-1], exact[-1].square().sum().float())


def grouped_weight_grad_triton() -> None:
    """The gradient of the last expert, of which the last tile is computed, from the last rows."""
    experts, count, height, width = 5, 2**16 + 5, 2**15 + 16, 2**14
    left, right, grad = large(count, height), large(count, width), torch.empty(experts, height, width)
    groups = Groups(torch.tensor([count - LAST, *[0] * (experts - 2), LAST]))
    grouped_weight_grad.add_grouped_gradient(grad, left, right, groups, overwrite=True)
    exact = left[-LAST:, -16:].double().t() @ right[-LAST:, -16:].double()
    torch.testing.assert_close(grad[-1, -16:, -16:], exact.float())


def recurrence_triton() -> None:
    """As `attention_triton`."""
    tokens, distance = 70, 2**25 - 8
    far = torch.empty(tokens * distance, dtype=torch.bfloat16).as_strided((tokens, 1, 1, 16), (distance, 16, 16, 1))
    far.copy_(torch.randn(far.shape) / 4)
    near, decay, strength = far.contiguous(), -torch.rand(tokens, 1, 1), torch.rand(tokens, 1, 1)
    results = []
    for x in (far, near):
        inputs = recurrence.Tokens(x, x, x, decay, strength)
        results.append((*recurrence.forward(inputs), *recurrence.backward(near, inputs)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def index_scores_triton() -> None:
    """As `attention_triton`, for one query."""
    rows, distance = 140, 2**24 - 8
    far = torch.empty(rows * distance, dtype=torch.bfloat16).as_strided((rows, 1, 16), (distance, 16, 1))
    far.copy_(torch.randn(far.shape))
    near, w = far.contiguous(), torch.rand(rows, 1, 1)
    chosen, last = torch.tensor([[[0, 70, 139]]], dtype=torch.int32), torch.full((1, 1), rows - 1)
    grad, results = torch.randn(1, 1, 3), []
    for x in (far, near):
        inputs = x.unsqueeze(2)[-1:], x, w[-1:]
        selections = [index_scores.select(*inputs, top=3, positions=last, exact=exact) for exact in (False, True)]
        scores = index_scores.selected_scores(*inputs, chosen)
        results.append((*selections, scores, *index_scores.selected_scores_backward(grad, *inputs, chosen)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def sparse_attention_triton() -> None:
    """As `attention_triton`."""
    rows, distance = 140, 2**24 - 8
    far = torch.empty(rows * distance, dtype=torch.bfloat16).as_strided((rows, 1, 1, 16), (distance, 16, 16, 1))
    far.copy_(torch.randn(far.shape))
    near, chosen = far.contiguous(), torch.tensor([[[0, 70, 139]]], dtype=torch.int32).expand(LAST, 1, 3)
    results = []
    for x in (far, near):
        q, dout = x[-LAST:], near[-LAST:]
        out, lse = sparse_attention.forward(q, x, 16, chosen, 0.25)
        gradients = sparse_attention.backward(dout, q, x, 16, out, lse, chosen, 0.25)
        p = sparse_attention.probabilities(q, x, chosen, lse, 0.25)
        results.append((out, lse, gradients.q, gradients.keys, p))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def selected_rows_triton() -> None:
    """The last row of the sum."""
    from megalite_kernels import selected_rows_triton

    rows, width = 2**17 + 5, 2**14 + 64
    total, x = torch.empty(rows, 1, 1, width), torch.randn(1, 1, 1, width).bfloat16()
    total[-1] = 0
    chosen = torch.tensor([[[rows - 1]]], dtype=torch.int32)
    selected_rows_triton.add(total, torch.full((1, 1, 1, 1), 2.0).bfloat16(), x, chosen)
    torch.testing.assert_close(total[-1, 0, 0, -16:], 2 * x[0, 0, 0, -16:].float())


if __name__ == "__main__":
    faulthandler.enable()
    torch.manual_seed(7)
    interpret_last_programs()
    backend.select("triton")
    cases = (
        activation_triton,
        adamw_triton,
        attention_part_triton,
        attention_triton,
        block_matmul_triton,
        causal_conv_triton,
        cross_entropy_triton,
        dropout_triton,
        fp8_matmul_triton,
        fp8_mx_matmul_triton,
        fp8_triton,
        fp8_weight_grad_triton,
        gated_norm_triton,
        grad_norm_triton,
    )
    for case in (
        *cases,
        grouped_weight_grad_triton,
        index_scores_triton,
        norm_triton,
        ordered_sum_triton,
        permutation_triton,
        recurrence_triton,
        rotary_triton,
        selected_rows_triton,
        sparse_attention_triton,
    ):
        case()
        print(case.__name__, flush=True)

"""Triton's interpreter, made to treat bf16 as a GPU does.

It keeps bf16 as its 16 bits in an unsigned integer. As it comes, it computes with those integers, multiplies matrices
of them, and cuts fp32 off instead of rounding it. With the repair a bf16 operand is widened to fp32 first, and results
are rounded to the nearest, ties to even. Other dtypes are exact as they are. Matmuls with a scale for each 32 numbers,
which it lacks, multiply the numbers times their scales in fp32.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(handle: TensorHandle) -> TensorHandle:
    """bf16 as fp32; anything else as it is."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrow(values: np.ndarray) -> TensorHandle:
    """fp32 values as bf16: the upper half of the bits, after adding half of what is cut off, or just less where the
    upper half is even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return TensorHandle(np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def scaled(handle: TensorHandle, exponents: TensorHandle) -> np.ndarray:
    """[rows, k] e4m3 times [rows, k / 32] powers of two, as biased exponents, in fp32; exponent 255 is NaN."""
    sign, exponent, mantissa = handle.data >> 7, (handle.data >> 3 & 15).astype(np.int32), handle.data & 7
    magnitude = np.ldexp(np.where(exponent > 0, 8.0, 0.0) + mantissa, np.maximum(exponent, 1) - 10)
    numbers = np.where(handle.data & 0x7F == 0x7F, np.nan, np.where(sign, -magnitude, magnitude))
    powers = np.where(exponents.data == 255, np.nan, np.exp2(exponents.data.astype(np.float64) - 127))
    return (numbers * powers.repeat(32, axis=1)).astype(np.float32)


def dot_scaled(self, left, left_scale, _, right, right_scale, *rest):
    total = rest[-1]
    product = np.matmul(scaled(left, left_scale), scaled(TensorHandle(right.data.T, right.dtype), right_scale).T)
    return TensorHandle(product + total.data, total.dtype.scalar)


def repair() -> None:
    """Change the interpreter of this process, once."""
    builder = InterpreterBuilder
    cast, convert, binary, unary, dot = (
        getattr(builder, name) for name in ("cast_impl", "create_fp_to_fp", "binary_op", "unary_op", "create_dot")
    )

    def repaired_cast(self, source, target):
        source = widen(source)
        return narrow(source.data) if target.scalar == tl.bfloat16 else cast(self, source, target)

    def repaired_convert(self, source, target, rounding):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return repaired_cast(self, source, target)
        return convert(self, source, target, rounding)

    def repaired_binary(self, left, right, function):
        if left.dtype.scalar != tl.bfloat16 or right.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, function)
        result = function(widen(left).data, widen(right).data)
        return TensorHandle(result, tl.int1) if result.dtype == bool else narrow(result)

    def repaired_unary(self, operand, function):
        return (
            narrow(function(widen(operand).data))
            if operand.dtype.scalar == tl.bfloat16
            else unary(self, operand, function)
        )

    def repaired_dot(self, left, right, *rest):
        return dot(self, widen(left), widen(right), *rest)

    builder.cast_impl, builder.create_fp_to_fp = repaired_cast, repaired_convert
    builder.binary_op, builder.unary_op, builder.create_dot = repaired_binary, repaired_unary, repaired_dot
    builder.create_dot_scaled = dot_scaled

"""The operations of a transformer step as explicit forward and backward functions, one operation per file.

Functions take and return tensors: the caller decides what to save and where gradients accumulate. Arithmetic
is in at least fp32 (`torch.promote_types(dtype, torch.float32)`), so the same code runs in fp64 for tests.
This package imports nothing of megalite.
"""

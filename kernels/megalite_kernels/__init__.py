"""The operations of a transformer step as explicit forward and backward functions, one operation a file.

Each function takes and returns tensors only: the caller decides what to save and where a gradient is accumulated. Arithmetic is in at
least fp32 (`torch.promote_types(dtype, torch.float32)`), so the same code runs in fp64 for proof. Nothing here knows of megalite.
"""

"""Tensor-parallel layers: each computes with its part of a weight and says which communication its two directions need.

Start with linear.py. May import megalite.parallel's weights and collectives, the kernels and what is below.
"""

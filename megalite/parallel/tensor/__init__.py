"""Tensor-parallel layers: each computes with its part of a weight and states its communication in forward and
backward.

Start with linear.py. May import megalite.parallel's weights and collectives, the kernels and what is below.
"""

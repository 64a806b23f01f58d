"""Tensor-parallel layers, each of which computes with its part of a weight.

Their docstrings state the communication in forward and backward. Start with linear.py. This package may
import megalite.parallel's weights and collectives, the kernels and the packages below.
"""

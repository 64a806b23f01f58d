"""Context parallelism: each cp rank holds a part of every sequence.

Attention exchanges data between the ranks.

Start with parts.py, which defines the parts; attend.py selects the method. This package may import
megalite.parallel's collectives, the kernels and the packages below.
"""

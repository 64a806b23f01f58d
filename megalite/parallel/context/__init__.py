"""Context parallelism: each cp rank holds a part of every sequence, and attention exchanges what it needs of
the others.

Start with parts.py, which says who holds what; attend.py chooses between the methods. May import
megalite.parallel's collectives, the kernels and what is below.
"""

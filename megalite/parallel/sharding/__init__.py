"""Data parallelism: flat buckets of weights and gradients, their reduction, and their sharding (ZeRO 0 to 3).

May import megalite.parallel's weights, specs and collectives and what is below.
"""

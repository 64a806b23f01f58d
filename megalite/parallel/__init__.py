"""Distribution of one model over ranks: parameter specs, weights, collectives, and the kinds of parallelism.

Start with spec.py. Each kind of parallelism has its own package. This package may import megalite.mesh, rng
and the packages below; pipeline/ and sharding/ do not import each other.
"""

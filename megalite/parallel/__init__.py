"""How one model is distributed over ranks: parameter specs (spec.py), weights, collectives, and one package
for each kind of parallelism.

Start with spec.py. May import megalite.mesh, rng and what is below; pipeline/ and sharding/ do not import
each other.
"""

"""How one model spreads over many ranks: parameter specs (spec.py), weights, collectives; tensor/, pipeline/ and sharding/ are the axes.

Start with spec.py. May import megalite.mesh, rng and what is below; pipeline/ and sharding/ do not know each other.
"""

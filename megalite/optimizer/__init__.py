"""Optimizers over shards: AdamW (adamw.py) and Muon (muon/).

Further files have their sharded state, learning-rate schedules, loss scaling, the gradient norm and clipping.
registry.py names the optimizers.

May import megalite.parallel and what is below.
"""

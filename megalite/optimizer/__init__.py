"""AdamW over shards (adamw.py), Muon (muon/), their sharded state, learning-rate schedules, loss scaling,
gradient norm and clipping. registry.py names the optimizers.

May import megalite.parallel and what is below.
"""

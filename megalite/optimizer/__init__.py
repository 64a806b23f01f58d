"""AdamW over shards (adamw.py), learning-rate schedules, loss scaling, gradient norm and clipping (norm.py).

May import megalite.parallel and what is below.
"""

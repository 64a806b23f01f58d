"""Configuration and mesh → the parts of a run: plan.py is what follows from the configuration alone, parts.py builds modules and stores.

May import megalite.model, optimizer, data, checkpoint and what is below; plan.py imports no torch.
"""

"""From configuration and mesh to the parts of a run: plan.py derives data from the configuration, parts.py
builds modules and stores.

May import megalite.model, optimizer, data, checkpoint and what is below; plan.py imports no torch.
"""

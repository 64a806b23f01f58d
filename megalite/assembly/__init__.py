"""Builds the parts of a run from a configuration and a mesh.

plan.py derives data from the configuration, parts.py builds modules and stores.

May import megalite.model, optimizer, data, checkpoint and what is below; plan.py imports no torch.
"""

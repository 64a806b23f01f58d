"""Mixtures of experts: which experts process a token (routing), dispatch and combine of its
rows, and grouped matmuls.

Start with `megalite.model.moe`, which calls these modules in order: router.py, choice.py, balance.py,
dispatch.py, grouped_matmul.py.
"""

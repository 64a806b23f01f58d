"""Mixture of experts: routing, dispatch and combine of the rows of tokens, and grouped matmuls.

Start with `megalite.model.moe`, which calls these modules in order: router.py, choice.py, balance.py,
dispatch.py, grouped_matmul.py.
"""

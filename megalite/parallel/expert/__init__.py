"""Mixtures of experts: which experts process a token (routing), the way of its row to them and back, and
their matrix products.

Start with `megalite.model.moe`, which calls these modules in order: router.py, choice.py, balance.py,
dispatch.py, grouped_matmul.py.
"""

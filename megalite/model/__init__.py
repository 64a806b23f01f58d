"""The transformer, written once: a model family is a set of `ModelConfig` values.

Start with transformer.py, then stage.py (a pipeline stage). parameters.py lists the stored parameters, and
cost/ counts the cost of a unit (both without torch). May import megalite.parallel, the kernels and what is
below.
"""

"""The transformer, written once: a model family is a set of `megalite.config.schema.ModelConfig` values.

Start with transformer.py, then stage.py (a pipeline stage); parameters.py lists the stored parameters, cost/
what a unit costs (no torch). May import megalite.parallel, the kernels and what is below.
"""

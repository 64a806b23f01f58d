"""The transformer, written once: a model family is a row of axis values (`megalite.config.schema.ModelConfig`).

Start with transformer.py, then stage.py (a pipeline stage); parameters.py lists what is stored, cost.py what a unit computes (no torch).
May import megalite.parallel, the kernels and what is below.
"""

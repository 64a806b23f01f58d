"""From tokens to microbatches: tokenizers, the indexed token file (indexed.py), sample order and blends
(dataset.py), the loader.

preparation/ writes token files. May import megalite.config and the modules beneath everything (batch, rng …);
preparation imports no torch.
"""

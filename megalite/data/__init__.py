"""Data pipeline: tokenizers, indexed token files, sample order and the loader.

indexed.py reads token files, dataset.py determines the order of samples and blends, loader.py returns
microbatches.

preparation/ writes token files. May import megalite.config and the modules beneath everything (batch, rng …);
preparation imports no torch.
"""

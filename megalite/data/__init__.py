"""Tokens in, microbatches out: the indexed token file, sample order and blends, the prefetching loader."""

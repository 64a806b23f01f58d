"""Text in, microbatches out: tokenizers, the indexed token file, sample order and blends, the prefetching loader."""

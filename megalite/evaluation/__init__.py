"""Log-probabilities of tokens (scoring.py), perplexity of texts (perplexity.py), and tasks of
lm-evaluation-harness (harness.py).

logits.py compares a checkpoint with transformers. May import megalite.generation, huggingface and what is
below.
"""

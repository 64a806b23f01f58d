"""How well a model predicts: log-probabilities of tokens (scoring.py), of texts (perplexity.py), and the tasks of lm-evaluation-harness.

logits.py compares a checkpoint with transformers. May import megalite.generation, huggingface and what is below.
"""

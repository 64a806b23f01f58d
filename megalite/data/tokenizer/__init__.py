"""Tokenizers: text ↔ tokens (tokenizers.py), and whether two are the same (identity.py, comparison.py)."""

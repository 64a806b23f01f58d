"""Tokenizers (tokenizers.py) and their comparison (identity.py, comparison.py)."""

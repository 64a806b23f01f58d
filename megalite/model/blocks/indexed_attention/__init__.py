"""Latent attention to the rows that an indexer selects (DeepSeek sparse attention, DSA)."""

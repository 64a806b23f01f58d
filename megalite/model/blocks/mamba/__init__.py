"""Mamba-2 (Dao, Gu 2024)."""

"""Repetition of a step's forward and backward on other ranks, which finds and names a rank that computes
wrong values."""

"""Tensor-parallel layers: each computes with its part of a weight and says which communication its two directions need."""

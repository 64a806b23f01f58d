"""Multi-token prediction (MTP): the head's further losses in training, each from a module with its own layer.

modules.py computes them. losses.py says how many losses and layers a model has; the other files answer what a
kind of block answers: stored parameters, cost, statistics.
"""

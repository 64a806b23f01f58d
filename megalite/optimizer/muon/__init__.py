"""The Muon optimizer.

muon.py is the optimizer, ownership.py (without torch) decides which rank orthogonalizes which matrix,
exchange.py is one rank's side of the exchange, and newton_schulz.py orthogonalizes a matrix.
"""

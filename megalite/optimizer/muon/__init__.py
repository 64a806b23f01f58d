"""Muon: the optimizer (muon.py), which rank orthogonalizes which matrix (ownership.py, without torch), one
rank's side of the exchange (exchange.py), and the orthogonalization itself (newton_schulz.py).
"""

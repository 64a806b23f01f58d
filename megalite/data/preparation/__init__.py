"""Texts and conversations → a token file: prepare.py is where to start, sources.py reads inputs, writer.py writes. Imports no torch."""

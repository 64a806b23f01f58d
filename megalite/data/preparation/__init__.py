"""Preparation of token files from texts and conversations, which starts in prepare.py.

sources.py reads inputs, writer.py writes token files.
"""

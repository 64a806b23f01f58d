"""Conversion of other projects' configurations to ours; start at convert.py.

May import only megalite.config.
"""

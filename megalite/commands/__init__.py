"""The command lines: each module parses its options, makes one call into the library and prints. Start with
start.py, which lists them.

May import everything in megalite; nothing in megalite imports it, except __main__.py.
"""

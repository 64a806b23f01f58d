"""Spaces of layouts and models, each of whose cases must train as on one process.

space.py       Space: options, legal cases, table of every pair of values, random samples
layouts.py     the equivalence table; context.py, experts.py and attention.py vary further options
covering.py    SPACES by name; searches the tables in tables/ (`python -m tests.support.spaces.covering NAME`)

To add a layout, add a value to an option of its space and search the table again.
"""

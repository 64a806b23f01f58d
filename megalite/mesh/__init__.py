"""Coordinates of the ranks, and their process groups.

layout.py has the coordinates of every rank of any world, without torch; mesh.py is one process's view of it,
with its process groups, which groups.py creates; map.py prints it. May import megalite.system, config and
nothing else.
"""

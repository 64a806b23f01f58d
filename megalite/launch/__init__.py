"""Starting and ending ranks: process.py is one rank's device, settings and process group; local_ranks.py
starts several on this machine.

environment.py compares what the ranks run on. May import megalite.assembly and what is below.
"""

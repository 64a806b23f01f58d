"""Trackers that also get the metrics of a run, one file each; selection.py lists and opens them."""

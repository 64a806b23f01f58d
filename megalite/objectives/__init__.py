"""Objectives: what training minimizes. One file each, free of torch until it computes."""

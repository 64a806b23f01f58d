"""Conversion of DeepSpeed and Accelerate configurations to ours; start at convert.py. May import only megalite.config."""

"""DeepSpeed's and Accelerate's configurations → ours. convert.py is where to start. May import megalite.config alone."""

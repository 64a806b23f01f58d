"""Speed and memory, measured: `tools/benchmark.py` runs the comparisons here and results/ keeps what they gave.

step.py, overhead.py     a comparison each: which runs, in which order, and what is computed from them
ours.py, peer.py         one measured run each, in processes of their own: megalite's trainer, transformers' model
measure.py               what a measured process does: time steps and matrix products, read its memory
report.py                starts the processes, describes the machine, writes JSON and tables
"""

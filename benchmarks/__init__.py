"""Speed and memory, measured: `tools/benchmark.py` runs the comparisons here and results/ keeps what they gave.

step.py, overhead.py     a comparison each: which runs, in which order, and what is computed from them
kernels.py               every kernel on a GPU: kernel_run.py measures the cases of kernel_cases.py and attention_cases.py, tuning.py tries
                         other settings, kernel_page.py writes the table of docs/kernels.md
scaling.py               one training on more and more ranks, each world measured by scaling_run.py
ours.py, peer.py         one measured run each, in processes of their own: megalite's trainer, transformers' model
measure.py               what a measured process does: time steps and matrix products, read its memory
report.py                starts the processes, describes the machine, writes JSON and tables
"""

"""Benchmarks of speed and memory: `tools/benchmark.py` runs the comparisons here, and results/ stores their
results.

step.py, overhead.py     one comparison each: which runs, in which order, and the figures computed from them
peers.py, pairs.py       ratios to other programs at equal settings, one per round; written_out.py is a GPT in
plain torch
kernels.py               every kernel on a GPU: kernel_run.py measures the cases of kernel_cases.py and its
neighbours, tuning.py tries
                         other settings, kernel_page.py writes the table of docs/kernels.md
scaling.py               one training on growing numbers of ranks, each world measured by scaling_run.py
prepare.py               preparation of data, each way measured by preparing.py
ours.py, peer.py         one measured run each, in its own process: megalite's trainer, transformers' model
breakdown.py             where a step's time goes, in columns; breakdown_run.py measures it on the ranks of
the step
measure.py               shared by measured processes: time steps and matrix products, read memory
host_copies.py           copies between host and device memory
registers.py             registers and spills of the kernels that a process has launched
profiled.py              the kernels of a step, and the device's idle time
first_light/             `megalite first-light`: proofs and measurements on a GPU in one command
report.py                starts the processes, describes the machine, writes JSON and tables
"""

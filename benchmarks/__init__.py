"""Benchmarks of speed and memory. `tools/benchmark.py` runs them and stores the results in results/.

step.py, overhead.py     one comparison each: its runs, their order, and the figures computed from them
peers.py                 ratios to other programs at equal settings, each measured by a module named `…_peer`
kernels.py               all kernels on a GPU: kernel_run.py measures kernel_cases.py, attention_cases.py,
                         expert_cases.py, fp8_cases.py, hybrid_cases.py, quantized_cases.py and
                         sparse_cases.py; tuning.py tries other settings; kernel_page.py: docs/kernels.md
host.py                  the host's part of a step of small models, against transformers; counting.py counts
                         the operations and autograd nodes, launches_run.py those of the Triton path
scaling.py               one training on increasing numbers of ranks
… _run                   measured processes of the comparison with the same name; trainer_run.py runs
                         megalite's trainer, and breakdown_run.py breaks down the time of its step
measure.py               functions of measured processes
host_copies.py           copies between host and device memory
profiled.py              the kernels of a step, the idle time of the device, registers and spills of kernels
first_light/             `megalite first-light`: proofs and measurements on a GPU in one command
report.py                starts the processes, describes the machine, writes JSON and tables
"""

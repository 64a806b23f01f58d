"""`megalite first-light`: proofs and measurements on a machine with GPUs, in one command; `--rehearse` runs
the same code on a CPU.

parts.py         the seven parts in order, and their time limits
run.py           the command's process: starts each part, writes its rows as they come, ends it at its limit
part.py          the process of a part
rows.py          what a part reports
machine.py       1  versions, topology, clocks; known.yaml: known troubles
values.py        2  kernels against float64, and the tests marked gpu
step.py          3  a training step; routes.py: attention and the weight gradient's matmul by each route, and
the table of the fastest
layouts.py       4  layouts against one process; layout_rank.py is one of their ranks
exchange.py      5  bandwidth and latency of links; exchange_rank.py is a rank
speeds.py        6  every kernel against its limit and its peers
predictions.py   7  the planner's predictions beside what was measured
"""

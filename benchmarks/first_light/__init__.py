"""`megalite first-light`: proofs and measurements on a machine with GPUs, in one command.

`--rehearse` runs the same code on a CPU.

    parts.py        the eight parts in order, and their time limits
    run.py          the main process: starts each part, writes its rows as they arrive, ends it at its limit
    part.py         the process of a part
    rows.py         the rows that a part reports
    machine.py      1  versions, topology, clocks; known.yaml: known issues
    values.py       2  kernels against float64, and the tests marked gpu
    step.py         3  a training step; routes.py: routes of attention and of the weight gradient's matmul,
                       and the table of the fastest ones
    layouts.py      4  layouts against one process; layout_rank.py is one of their ranks
    graphs.py       5  CUDA graphs of stages against the eager step
    exchange.py     6  bandwidth and latency of links; exchange_rank.py is a rank
    speeds.py       7  all kernels against the limits of the device and their peers
    predictions.py  8  predictions of the planner compared with the measurements
"""

"""What distributed tests share: ranks, configurations, jobs that ranks run, and the layouts to compare.

pool.py                      real gloo ranks: `ranks.run(world, job, *args)` returns each rank's result
configs.py                   a small model and random documents: `config_of(case, prefix)`
jobs.py, jobs_*.py           jobs, by what they exercise
references.py                results of one process, computed once per run of the suite
spaces/                      which layouts are compared with one process
faults/                      processes that are delayed, hang, are killed or lost
random_configurations.py     random legal configurations train alike on every layout, others are rejected
random_option_groups.py      further options of theirs, such as kinds of attention or experts
resharding.py                a checkpoint of one layout loaded on another
device_rules.py              detects waits of the host for a GPU, on a CPU
virtual_time.py              a clock that a test sets
forked_programs.py           Python programs forked from a process that has imported torch

To add a layout, add a row to the table of its test, or a value to an option of a space (spaces/). To add a job, define
a function of (context, …) at the top level of a module that ranks can import; make meshes with `jobs.mesh_of`.
"""

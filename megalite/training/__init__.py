"""The training of a run: one optimizer step, the loop around it, and its checks.

trainer.py runs one optimizer step from top to bottom, weight_update.py ends it, and fit.py is the training
loop. bad_steps.py, watchdog.py and fault_injection.py handle faults; dry_run.py builds a run without starting
it; verify.py compares a run with a single process. This package may import everything in megalite except the
commands.
"""

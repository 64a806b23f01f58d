"""A run: trainer.py is one optimizer step from top to bottom, weight_update.py the end of a step, fit.py the
loop around them.

bad_steps.py, watchdog.py and fault_injection.py handle faults; dry_run.py builds a run without starting it;
verify.py compares a run with one process. May import everything in megalite except the commands.
"""

"""A run: trainer.py is one optimizer step from top to bottom, fit.py the loop around it; step_finalizer.py ends a step.

faults.py, guard.py and watchdog.py handle what goes wrong, dry_run.py and verify.py run without or beside a real one.
May import everything in megalite but the commands.
"""

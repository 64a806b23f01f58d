"""Pipeline parallelism: schedules as plain data and the one runtime that executes them.

Start with schedule.py; generator.py makes the schedules, passes insert communication, validator.py and simulator.py read them (no torch),
runtime.py runs them. May import megalite.mesh and what is below.
"""

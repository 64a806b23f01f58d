"""Pipeline parallelism: schedules as plain data and the one runtime that executes them.

Start with schedule.py. generator.py builds the schedules, passes insert communication, validator.py and
simulator.py read them (none of these imports torch), runtime.py executes them. May import megalite.mesh and
what is below.
"""

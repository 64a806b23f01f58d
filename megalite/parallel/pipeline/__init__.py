"""Pipeline parallelism: schedules as plain data, and the runtime that executes them.

Start with schedule.py. generator.py builds the schedules, passes insert communication, and validator.py and
simulator.py read them; none of these imports torch. runtime.py executes them. This package may import
megalite.mesh and the packages below.
"""

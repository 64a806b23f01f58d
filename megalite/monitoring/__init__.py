"""Instruments of a run: metrics, console, phases, sensors, traces, timelines and the report page.

observers.py lists the instruments, observer.py is their protocol. May import megalite.planner, launch, build
and the packages below them.
"""

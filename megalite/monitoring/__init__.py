"""Instruments of a run: metrics, console, phases, sensors, traces, timelines and the report page.

observers.py has the base class of the instruments and lists them. May import megalite.planner, launch, build
and the packages below them.
"""

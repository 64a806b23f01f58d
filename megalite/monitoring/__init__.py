"""Instruments of a run: metrics, console, phases, sensors, traces, timelines and the report page.

The instruments and their base class are listed in observers.py. This package may import megalite.planner,
launch, build and the packages below them.
"""

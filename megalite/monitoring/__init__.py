"""What watches a run without being part of it: metrics, console, phases, sensors, traces, timelines and the report page.

observers.py lists the instruments of a run, observer.py is their protocol. May import megalite.planning, launch, build and what is below.
"""

"""What a process has of the machine, and what it says: signals and processes, clocks, memory, messages,
progress.

activity.py is what a rank does now, which other threads read. Knows neither models nor parallelism. May
import megalite.config.
"""

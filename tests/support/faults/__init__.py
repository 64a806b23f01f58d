"""Processes that are delayed, hang, are killed or lost.

delays.py            random delays, which must not change a bit
hangs.py             ranks that hang, explained by the records of all
killed_commands.py   SIGKILL of `megalite` commands; killed_ranks.py kills ranks of a run that is then resumed
lost_ranks.py        ranks that end or stop at random actions, named by the others
random_cases.py      the command line of those that run as programs
"""

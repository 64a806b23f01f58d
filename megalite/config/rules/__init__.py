"""Every check between fields of a configuration: a file for each part of a run, all_rules.py puts them in order and asks them.

May import the rest of megalite.config, but for load.py.
"""

from megalite.config.rules.all_rules import RULES, check

__all__ = ["RULES", "check"]

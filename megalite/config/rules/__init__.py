"""Checks between options: one file for each part of a run; all_rules.py defines their order and runs them.

May import the rest of megalite.config except load.py.
"""

from megalite.config.rules.all_rules import RULES, check

__all__ = ["RULES", "check"]

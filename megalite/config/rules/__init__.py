"""Rules of the configuration: bounds, and one file for each subject of the rules between sections.

The rules of one section are in its file in sections/, those of the model in model.py here. all_rules.py
defines the order and runs them. May import the rest of megalite.config except load.py.
"""

from megalite.config.rules.all_rules import LAYOUT_RULES, MODEL_RULES, RULES, check

__all__ = ["LAYOUT_RULES", "MODEL_RULES", "RULES", "check"]

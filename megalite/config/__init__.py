"""The configuration of a run: typed sections (schema.py), YAML and command line (load.py), and rules between
options (rules/).

families.py converts a Hugging Face config.json to the options of a model. Imports no torch and nothing else
of megalite but checkout.py.
"""

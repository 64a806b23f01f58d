"""The configuration of a run: typed sections (schema.py), YAML and command line (load.py), and rules between
options (rules/).

Free of torch.
"""

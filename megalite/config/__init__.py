"""What a run is: typed sections (schema.py), their YAML and command line (load.py), and the rules between them (rules/).

families.py turns a Hugging Face config.json into a model's options, importers/ other programs' configurations into ours.
Imports no torch and nothing else of megalite but checkout.py.
"""

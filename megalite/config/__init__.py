"""What a run is: typed sections, their YAML and command line, and the rules between them. Imports no torch."""

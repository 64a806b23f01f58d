"""The command lines, and beside each that needs more than its own file a package of what it alone uses."""

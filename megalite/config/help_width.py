"""How wide the help of all commands is."""

import shutil

WIDEST = 100


def help_width() -> int:
    """Columns: those of the terminal, at most WIDEST."""
    return min(shutil.get_terminal_size().columns, WIDEST)

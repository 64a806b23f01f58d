"""Prints the coordinates of all ranks and the groups of a mesh.

Usage: `python -m megalite.mesh --tp 2 --pp 2 --dp 2`.
"""

from megalite.mesh.map import main

if __name__ == "__main__":
    main()

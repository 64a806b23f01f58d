"""The packages of a distribution; everything else about it is in pyproject.toml, whose `find` cannot add
configs/ under another name."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["megalite*"]), *find_packages("kernels"), "megalite.configs"])

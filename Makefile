# `make demo` and `make test` install everything they need on a machine with python3 (3.11 or newer), make and a C compiler.
#
# Without a GPU, PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' installs torch's CPU build, which saves gigabytes.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-matrix pictures manual lint install
.DEFAULT_GOAL := test

demo: $(VENV)/installed-demo
	$(BIN)/python tools/demo.py

# One thread: sums must not depend on the number of cores. First the tests whose ranks need both cores, then the rest in two processes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ranks" -n 2 --dist loadfile

# The long form, days in total on two cores: each call runs under ten minutes and the next continues. MATRIX='--part random' selects a part.
test-matrix: install
	$(BIN)/python -m tests.matrix --minutes 9 $(MATRIX)

# The pictures of docs/pipeline.md, drawn from the schedules; a test compares them.
pictures: install
	for name in gpipe 1f1b interleaved zb-h1 zb-h2 zb-v v-half; do \
		$(BIN)/python tools/bubble_calc.py --pp 4 --microbatches 8 --schedule $$name --timeline docs/pictures/$$name.svg > /dev/null || exit 1; \
	done
	$(BIN)/python -m benchmarks.parallelism_figures docs/pictures

# The manual as a searchable site in runs/manual.
manual: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir runs/manual

lint: install manual
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck tools/slurm/train.sbatch

install: $(VENV)/installed-dev

# The demo needs a third of the tests' packages: each target installs its own extra.
$(VENV)/installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[$*]'
	touch $@

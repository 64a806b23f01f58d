# `make demo` and `make test` do everything themselves, on a machine that has python3 (3.11 or newer), make and a C compiler.
#
# Without a GPU, PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' takes torch's CPU build, and saves gigabytes.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-matrix pictures manual lint install
.DEFAULT_GOAL := test

demo: $(VENV)/installed-demo
	$(BIN)/python tools/demo.py

# One thread: sums must not depend on a machine's cores. First what needs both cores for its ranks, then the rest in two processes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ranks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ranks" -n 2 --dist loadfile

# The long form, days in all on two cores: each call runs a slice of under ten minutes, the next continues. MATRIX='--part random' takes one part.
test-matrix: install
	$(BIN)/python -m tests.matrix --minutes 9 $(MATRIX)

# What docs/pipeline.md shows, drawn from the schedules themselves; a test compares.
pictures: install
	for name in gpipe 1f1b interleaved zb-h1 zb-h2 zb-v v-half; do \
		$(BIN)/python tools/bubble_calc.py --pp 4 --microbatches 8 --schedule $$name --timeline docs/pictures/$$name.svg > /dev/null || exit 1; \
	done
	$(BIN)/python -m benchmarks.parallelism_figures docs/pictures

# The manual as a site: docs/ with search, in runs/manual.
manual: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir runs/manual

lint: install manual
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck tools/slurm/train.sbatch

install: $(VENV)/installed-dev

# The demo needs a third of what the tests need: each target installs its own extra.
$(VENV)/installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[$*]'
	touch $@

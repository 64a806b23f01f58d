# `make demo` and `make test` install everything they need on a machine with python3 (3.11 or newer), make and a C compiler.
#
# Without a GPU, PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu' installs torch's CPU build, which saves gigabytes.

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Containers often set it. Hundreds of test processes would then compile every module again.
export PYTHONDONTWRITEBYTECODE :=

# A layout of each kind against one process, a schedule against another, and a resumed run, on two ranks.
QUICK_PROOFS := 'test_model_axes.py::test_equals_one_process[gpt2-tp2-sp]' \
	'test_model_axes.py::test_equals_one_process[gpt2-pp2]' \
	'test_zero.py::test_is_one_process[dp 2-3]' \
	'test_bitwise.py::test_tied_embeddings_under_every_schedule[zb-v-True]' \
	'test_resume.py::test_resuming_is_bitwise_the_run_that_never_stopped[dp2-zero2-bf16]'
QUICK_ROOMS := assembly config model monitoring optimizer parallel planning training

.PHONY: help demo quick test test-manual test-components test-matrix rehearse pictures manual lint install
.DEFAULT_GOAL := test

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(VENV)/installed-demo ## from nothing to a trained model: tokenizer, TP2 × PP2 × DP2 on eight ranks, a sample
	$(BIN)/python tools/demo.py

# One thread: sums must not depend on the number of cores. First the tests whose ranks need both cores, then the rest in two processes.
quick: install ## the tests to run after each edit, under 90 seconds on two cores
	cd tests/distributed && OMP_NUM_THREADS=1 ../../$(BIN)/python -m pytest $(QUICK_PROOFS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not ranks" -n 2 --dist loadfile $(addprefix tests/,$(QUICK_ROOMS))

# Ranks leave a part of both cores unused while they wait for each other: the tests without ranks run meanwhile, and are shown at the end.
# Those have a lower priority: with an equal one they end minutes earlier, and the ranks are alone on two cores, which they can not fill.
test: lint ## lint and every test
	@export OMP_NUM_THREADS=1; \
	nice -n 4 $(BIN)/python -m pytest -m "not ranks" -n 2 --dist loadfile --no-loadscope-reorder > $(VENV)/rest.log 2>&1 & rest=$$!; \
	$(BIN)/python -m pytest -m ranks; status=$$?; \
	wait $$rest || status=1; cat $(VENV)/rest.log; exit $$status

# Every command of the pages in docs/, as written there: 4 minutes on two cores.
test-manual: install ## the commands of the manual
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m manual

# Programs of others, each in its own environment under .components/: servers of object stores, launchers, trackers, readers of checkpoints.
test-components: install ## megalite beside programs whose pins conflict with ours
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m component $(COMPONENTS)

# The long form, days in total on two cores: each call runs under ten minutes and the next continues. MATRIX='--part random' selects a part.
test-matrix: install ## a slice of the long form of the proofs: MATRIX='--minutes 4 --part random'
	$(BIN)/python -m tests.matrix --minutes 9 $(MATRIX)

# What a machine with GPUs runs first, on the CPU: under two minutes on two cores.
rehearse: install ## megalite first-light without a GPU
	$(BIN)/python tools/first_light.py --rehearse

# The pictures of docs/pipeline.md, drawn from the schedules; a test compares them.
pictures: install ## draw the pictures of the manual
	for name in gpipe 1f1b interleaved zb-h1 zb-h2 zb-v v-half; do \
		$(BIN)/python tools/bubble_calc.py --pp 4 --microbatches 8 --schedule $$name --timeline docs/pictures/$$name.svg > /dev/null || exit 1; \
	done
	$(BIN)/python -m benchmarks.parallelism_figures docs/pictures

# The manual as a site: docs/ with search, in runs/manual.
manual: install ## build the manual as a site, in runs/manual
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir runs/manual

lint: install manual ## ruff, mypy, import-linter, shellcheck, the links of the manual; names what is long
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.structure.alarms
	$(BIN)/shellcheck tools/slurm/train.sbatch

install: $(VENV)/installed-dev ## make .venv with all that development needs

# The demo needs a third of the tests' packages: each target installs its own extra. pip says what it downloads, with a bar on a terminal.
$(VENV)/installed-%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing megalite[$*] and what it needs into $(VENV): some minutes; the last one, after 'Installing collected packages', is silent"
	@$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[$*]'
	@touch $@

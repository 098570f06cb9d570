# The two commands of the README, and what they stand on. Set-up needs Python >= 3.11 and a package index, nothing else.
#
#   PYTHON  the interpreter that .venv is made with       make PYTHON=python3.12 demo
#   VENV    where everything is installed                 make VENV=build/venv test
#   ARGS    passed on to pytest                           make pytest ARGS='tests/core -x'

PYTHON ?= python3
VENV ?= .venv
ARGS =
# as many processes run the tests; empty: this one
PROCESSES =

BIN := $(VENV)/bin
BENCH := .venv-bench
STAMPS := $(VENV)/.stamps
REQ := requirements
# Only the packages that differ; put in front of VENV.
OLDEST = $(abspath $(VENV))/oldest
# A file is compiled when it is imported first, as one in four is; pip would compile all of them, on one core.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-input --no-compile
# Constraints hold every version that was tested, so no later install can replace torch by another build.
PIP := $(INSTALL) -c $(REQ)/constraints.txt
# Bytecode is kept, also where the environment says otherwise: each process that a test starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE
# Nothing that pyright would look up on the network; its node comes with the tools.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test setup lint types pytest oldest bench fmt lock clean FORCE

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | while IFS='	' read -r name what; do \
	    printf '  make %-8s %s\n' "$$name" "$$what"; done

demo: $(STAMPS)/house ## set up, then show the pool at work on the real engine on this machine's CPU
	@$(BIN)/enginepool demo

# Many tests wait, so five processes run them on two cores. Pyright, and then the oldest engine, run next to them: they end before
# the tests do, and so the closing line of pytest is the last one.
test: setup lint ## set up, then run everything that CI runs
	@$(MAKE) --no-print-directory --jobs=2 pytest types oldest PROCESSES=5

setup: $(STAMPS)/tools ## install the package, the engine and the tools into .venv
	@:

lint: setup ## ruff: rules and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: setup ## pyright, strict
	@$(BIN)/pyright --pythonpath $(BIN)/python

pytest: setup ## the tests alone; ARGS='tests/core -x' narrows them
	@$(BIN)/pytest $(addprefix -n ,$(PROCESSES)) $(ARGS)

# Told in one piece, whatever runs next to it.
oldest: $(STAMPS)/oldest ## a short suite on the oldest supported SGLang
	@told=$$(mktemp); \
	PYTHONPATH=$(OLDEST) ENGINEPOOL_TEST_OLDEST=1 $(BIN)/pytest -m every_version tests/engine >$$told 2>&1; status=$$?; \
	cat $$told; rm $$told; exit $$status

# An environment of its own: the peers bring other versions of shared packages, and torch is not needed.
bench: $(BENCH)/.ready ## set up .venv-bench with the peers, then run the benchmarks that need no GPU (about 20 minutes)
	@for name in wire core memory; do $(BENCH)/bin/python -m bench.$$name || exit; done

$(BENCH)/.ready: bench/requirements.txt
	@$(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip --disable-pip-version-check install -qq --no-input -r $< -e .
	@touch $@

fmt: setup ## let ruff format and mend what it can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

lock: setup ## write what is installed to requirements/constraints.txt
	@$(BIN)/python -m pip --disable-pip-version-check freeze --all --exclude pip --exclude enginepool >$(VENV)/freeze
	@{ sed -n '/^#/p' $(REQ)/constraints.txt; sed 's/+cpu$$//' $(VENV)/freeze | LC_ALL=C sort -f; } >$(VENV)/lock
	@mv $(VENV)/lock $(REQ)/constraints.txt

clean: ## remove build results and caches; the environment in .venv stays
	rm -rf build dist enginepool.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Stamps are touched last, so a step that failed is done again. A step that was killed leaves `unfinished`, and an environment
# that was moved with its folder still runs the code in the old place: both are made anew.
define STEP
@touch $(STAMPS)/unfinished
@{ $(1); }; status=$$?; rm -f $(STAMPS)/unfinished; exit $$status
@touch $@
endef

ifneq ($(wildcard $(STAMPS)/unfinished),)
STALE := FORCE
else ifneq ($(shell cat $(STAMPS)/venv 2>/dev/null),$(CURDIR))
STALE := FORCE
endif

$(STAMPS)/venv: $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "enginepool needs Python 3.11 or newer, and '$(PYTHON)' is not one: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; \
	    exit 1; }
	@$(PYTHON) -m venv $$(test ! -d $(STAMPS) || echo --clear) $(VENV) || { \
	    echo "could not make $(VENV); Debian and Ubuntu keep venv in a package of its own: apt install python3-venv" >&2; exit 1; }
	@mkdir -p $(STAMPS)
	@echo '$(CURDIR)' >$@

$(STAMPS)/engine: $(STAMPS)/venv $(REQ)/cpu-engine.txt $(REQ)/cpu-engine-no-deps.txt $(REQ)/constraints.txt
	@echo "Setting up $(VENV): the engine, about 3 GB and two minutes; later runs skip this."
	$(call STEP,$(PIP) -r $(REQ)/cpu-engine.txt setuptools wheel && $(PIP) --no-deps -r $(REQ)/cpu-engine-no-deps.txt)

$(STAMPS)/house: $(STAMPS)/engine pyproject.toml
	@echo "Setting up $(VENV): enginepool."
	$(call STEP,$(PIP) --no-build-isolation -e .)

# pip would name what sglang was installed without. The compiled parts of torchaudio are for CUDA: where they lie and cannot be
# loaded, it cannot be imported, and neither can transformers; where they are missing, it does without.
$(STAMPS)/tools: $(STAMPS)/house $(REQ)/tools.txt
	@echo "Setting up $(VENV): the tools."
	$(call STEP,$(PIP) --no-warn-conflicts -r $(REQ)/tools.txt && rm -f $(VENV)/lib/python3*/site-packages/torchaudio/lib/*.so)

$(STAMPS)/oldest: $(STAMPS)/tools $(REQ)/oldest-engine.txt
	@echo "Setting up $(VENV)/oldest: the oldest supported engine, about 0.4 GB."
	$(call STEP,rm -rf $(OLDEST) && $(INSTALL) --no-deps --target $(OLDEST) -r $(REQ)/oldest-engine.txt)

# Everything runs inside .venv, which every target below sets up by itself when it is missing or out of date.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests mostly compile, which keeps one core busy: two workers make use of two.
PARALLEL := -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup lint types test test-all reproduce bench wheel clean rebuild

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# An interpreter asked for by name must not be answered with an environment made from another one.
ifneq ($(origin PYTHON),file)
SHOW_VERSION := -c 'import sys; print(sys.version_info[:2])'
ifneq ($(shell $(PYTHON) $(SHOW_VERSION)),$(shell $(BIN)/python $(SHOW_VERSION) 2>/dev/null))
$(CREATED) $(STAMP): rebuild
endif
endif

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mesascope needs Python 3.11 or newer; '$(PYTHON)' is missing or older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(STAMP): pyproject.toml constraints.txt | $(CREATED)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) hatchling
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## create .venv with the pinned versions of constraints.txt

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The node that comes with pyright[nodejs], not whichever one the machine has: nothing is downloaded at run time.
types: $(STAMP)  ## pyright
	PYRIGHT_PYTHON_GLOBAL_NODE=off PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

test: lint types  ## lint, types and the fast tests
	$(BIN)/python -m pytest $(PARALLEL) --durations=25 --durations-min=5

test-all: lint types  ## lint, types and every test that needs no GPU; records docs/test-all.md
	$(BIN)/python scripts/record_test_all.py $(PARALLEL)

reproduce: $(STAMP)  ## recompute the results
	$(BIN)/mesascope reproduce

bench: $(STAMP)  ## time the operations on this machine
	$(BIN)/mesascope bench

wheel: $(STAMP)  ## build dist/mesascope-*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

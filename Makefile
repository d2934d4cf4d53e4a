# Needs Python 3.12 or newer. `make demo` runs an example, `make test` the fast tests (about 19 CPU
# minutes), `make test-all` also the slow tests and the notebooks (about 55).
VENV := .venv
BIN := $(VENV)/bin
FIND_PYTHON = for p in python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done

.PHONY: demo test test-all test-seeds test-jax lint types docs dist benchmarks clean

demo: $(VENV)/.installed
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests pymc_gradmatch

test-all: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-seeds: $(VENV)/.installed-test
	.ci/test-seeds

test-jax: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable ".[test,petab,jax,benchmarks]"
	OMP_NUM_THREADS=1 GRADMATCH_SKIPS_NOTHING=1 $(BIN)/python -m pytest -n 2 -m jax tests

lint: $(VENV)/.installed-test
	bash -n .ci/run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going docs docs/_build/html

dist: $(BIN)/python
	.ci/test-dist

benchmarks: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.foundation
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.speed

$(BIN)/python:
	@python=$$($(FIND_PYTHON)); \
	if [ -z "$$python" ]; then echo "Python 3.12 or newer is needed and was not found" >&2; exit 1; fi; \
	$$python -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[test,petab]"
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[test,docs,petab]"
	@touch $@ $(VENV)/.installed $(VENV)/.installed-test

clean:
	rm -rf $(VENV) demo-output dist docs/_build docs/api/generated docs/notebooks

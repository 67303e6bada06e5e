# `make demo` and `make test` need Python 3.11 or newer and make; everything else is installed into .venv.

PYTHON ?= $(shell python3 -c 'import sys; print("python3" if sys.version_info >= (3, 11) else "python3.11")' 2>/dev/null || echo python3.11)
PY := .venv/bin/python
PYTHON_OLDEST ?= python3.12
PY_OLDEST := .venv-oldest/bin/python

# Modules are compiled once, not by each of the processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test all test-oldest lint types unit both format tour clean

demo: .venv/stamp
	$(PY) demo/demo.py

# mypy beside the tests: alone it would leave one of two cores idle for most of a minute.
test: lint
	$(MAKE) --no-print-directory -j2 types unit

lint: .venv/stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: .venv/stamp
	$(PY) -m mypy

# One compute thread per worker: bits depend on the number of threads, and two workers fill two cores.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal
THOROUGH = -m "" --hypothesis-profile=thorough

unit: .venv/stamp
	$(PYTEST)

# All tests, also the slow ones, with all examples of properties.
all: lint
	$(MAKE) --no-print-directory -j2 types both

both: .venv/stamp
	$(PYTEST) $(THOROUGH)

# The same tests, the long ones too, with the oldest torch and transformers that pyproject.toml allows, in an environment of their own. Not part of `test`:
# the usual torch for Linux carries the CUDA libraries, gigabytes to fetch; point pip at an index of CPU builds to avoid it.
test-oldest: .venv-oldest/stamp
	OMP_NUM_THREADS=1 $(PY_OLDEST) -m pytest -q -n 2 --dist worksteal $(THOROUGH)

format: .venv/stamp
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

tour: .venv/stamp
	$(PY) -m tests.tour

# Rebuilt when what is installed changes; the stamp is written last, so an interrupted install starts again.
.venv/stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; set PYTHON=path" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[run,test,dev]'
	touch .venv/stamp

.venv-oldest/stamp: pyproject.toml constraints-oldest.txt
	$(PYTHON_OLDEST) -c 'import sys; sys.exit("Python 3.12 is needed; set PYTHON_OLDEST=path" if sys.version_info[:2] != (3, 12) else 0)'
	$(PYTHON_OLDEST) -m venv .venv-oldest
	$(PY_OLDEST) -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[run,test]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .pytest_cache .hypothesis .mypy_cache .ruff_cache demo/out *.egg-info

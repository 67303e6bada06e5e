# `make demo` and `make test` need Python 3.11 or newer and make; everything else is installed into .venv.

PYTHON ?= $(shell python3 -c 'import sys; print("python3" if sys.version_info >= (3, 11) else "python3.11")' 2>/dev/null || echo python3.11)
PY := .venv/bin/python

.PHONY: demo test lint types unit format tour clean

demo: .venv/stamp
	$(PY) demo/demo.py

test: lint types unit

lint: .venv/stamp
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: .venv/stamp
	$(PY) -m mypy

# One compute thread per worker: the laws are stated for one thread, and two workers fill two cores.
unit: .venv/stamp
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist worksteal

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

clean:
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache demo/out *.egg-info

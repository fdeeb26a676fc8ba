# make run | test | fuzz | browser | lab | render | check: each builds the environment in .venv first if it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
# e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU wheel of torch
PIP_ARGS ?=
WORKERS ?= 2
NOTEBOOKS ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: run test fuzz browser lab render check walkthrough env clean

run: $(STAMP)
	$(PY) .ci/notebooks.py run $(NOTEBOOKS)

test: $(STAMP)
	$(PY) -m ruff check . .ci
	$(PY) -m ruff format --check . .ci
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

# some 30,000 damaged inputs, others on every run: tests/fuzz/README.md
fuzz: $(STAMP)
	K3LAB_FUZZ=long OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) tests/fuzz

# .ci/browser installs Chromium, or says how; screenshots go to out/browser/
browser: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m browser -n $(WORKERS) tests/browser

lab: $(STAMP)
	K3LAB_OUT="$(CURDIR)/out" $(PY) -m jupyterlab notebooks

render: $(STAMP)
	$(PY) .ci/notebooks.py render $(NOTEBOOKS)

check: $(STAMP)
	$(PY) .ci/notebooks.py check $(NOTEBOOKS)

# each committed notebook as one page that opens offline, in out/walkthrough/
walkthrough: $(STAMP)
	$(PY) .ci/walkthrough.py $(NOTEBOOKS)

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "k3lab needs Python 3.11 or newer, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[triton,notebook,test]"
	@touch $(STAMP)

clean:
	rm -rf out .pytest_cache .ruff_cache .hypothesis

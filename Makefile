# `make` alone lists what can be made. Everything runs in .venv, which is made when it is needed.

PYTHON ?= python3
JOBS   ?= 2

VENV  := .venv
RUN   := $(VENV)/bin/python
PIP   := $(RUN) -m pip --disable-pip-version-check install -qq -c constraints.txt
READY := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-browser test-cluster test-ecosystem test-wheels test-races mutants check documents docs wheels bench clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=… chooses the Python that .venv is made with (after make clean), JOBS=… the test processes."

demo: $(READY) ## train a small LSTM with and without zoneout, and compare them (runs/demo)
	@$(RUN) -m zoneout demo

test: $(READY) ## run every test, the examples in the documentation included
	@$(RUN) -m pytest -q -n $(JOBS) --dist worksteal

test-browser: $(READY) ## install Chromium (Debian's package) and playwright, and open the report and the site in it
	@command -v chromium >/dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; }
	@$(PIP) playwright
	@$(RUN) -m pytest -q -rs tests/paper/test_browser.py tests/test_site.py

test-cluster: $(READY) ## install Ray, and run a sweep on a local cluster of two nodes
	@$(PIP) 'ray[tune]' optuna
	@$(RUN) -m pytest -q -rs tests/paper/test_cluster.py

test-ecosystem: $(READY) ## install transformers, lightning, gymnasium and others; load models, run their examples
	@$(PIP) transformers accelerate lightning pytorch-forecasting gymnasium
	@$(RUN) -m pytest -q -rs tests/test_loaders.py tests/test_examples.py

test-wheels: wheels ## test what `make wheels` builds: contents, platforms, and the one of this machine without a compiler
	@ZONEOUT_DIST=dist $(RUN) -m pytest -q -rs tests/test_wheels.py

test-races: $(READY) ## run the emulated GPU kernels under ThreadSanitizer, which looks for races (an hour)
	@$(RUN) tests/races.py

mutants: $(READY) ## change 500 small things in the source, one at a time, and see that a test fails (hours with JOBS=2)
	@$(RUN) tests/mutation/run.py --jobs $(JOBS)

check: $(READY) ## ruff, mypy and the tests
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(MAKE) --no-print-directory test

documents: $(READY) ## write the tables and pictures of the README and docs/ from results/ and benchmarks/results.csv
	@$(RUN) -m zoneout reproduce --write
	@$(RUN) -m zoneout figures with-and-without rates scores-char-ptb training-time scores-word-ptb \
	  scores-text8-prefix scores-pmnist reach gains --out docs/pictures
	@$(RUN) benchmarks/table.py --write

docs: $(READY) ## build the documentation site (build/docs/index.html); a warning is an error
	@$(RUN) -m sphinx -q -W --keep-going -j auto docs build/docs
	@echo "build/docs/index.html"

wheels: $(READY) ## build the wheel of every platform, the pure wheel and the source archive (dist)
	@$(RUN) tools/wheels.py

bench: $(READY) ## run the benchmarks
	@$(RUN) benchmarks/bench.py

clean: ## remove .venv and all that was built or cached
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last and .venv is emptied first: an install that was cut short is begun again.
# torch comes first, alone: what is installed after it takes the build that is there.
$(READY): pyproject.toml constraints.txt
	@# Through a link the environment that it leads to would be emptied, for everybody who uses it.
	@if [ -L $(VENV) ]; then \
	  echo "$(VENV): expected a folder of this clone, got a link to $$(readlink $(VENV)), which making it" \
	    "would empty; try 'rm $(VENV)', which removes only the link"; \
	  exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "zoneout needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, as in  make test PYTHON=python3.12"; \
	  exit 1; }
	@echo "Making $(VENV) and installing into it: a minute or more, the first time."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) torch
	@$(PIP) hatchling
	@$(PIP) --no-build-isolation -e '.[dev]'
	@# A CUDA build of torch brings its run-time compiler; beside a CPU build it compiles the GPU's kernels in the tests.
	@if $(RUN) -c 'import platform, torch; exit(platform.system() != "Linux" or torch.version.cuda is not None)'; then \
	  $(PIP) nvidia-cuda-nvrtc==13.0.88; fi
	@touch $@

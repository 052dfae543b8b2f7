# What a newcomer and CI run. Everything is installed into $(VENV); nothing else on the machine changes.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO ?= demo-output
PYTEST_ARGS ?=
FUZZ_ARGS ?= --cases 12000
WORKERS ?= 2

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install -qq

# each file's tests in one worker, all that run a real nsys in one: releases that run at once lose each other's events
pytest := $(bin)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --durations=10

.PHONY: demo test test-fast test-full test-gpu lint bench site serve fuzz clean

demo: $(VENV)/.installed  ## train a small transformer under the embedded recorder and print what each layer costs
	@mkdir -p $(DEMO)
	KINETO_LOG_LEVEL=6 $(bin)/nvprof-kit record --force -o $(DEMO)/run.json.gz -- $(bin)/python examples/tiny_transformer.py
	@$(bin)/nvprof-kit layers $(DEMO)/run.json.gz -o $(DEMO)/layers.csv
	@$(bin)/nvprof-kit layers $(DEMO)/run.json.gz -o $(DEMO)/layers.png
	$(bin)/nvprof-kit layers $(DEMO)/run.json.gz
	@printf '\n%s/ holds the trace (run.json.gz), the table (layers.csv) and the plot (layers.png).\n' "$(DEMO)"

test: $(VENV)/.installed-test  ## what every change has to pass
	$(pytest) $(PYTEST_ARGS)

test-fast: $(VENV)/.installed-test  ## in two minutes: of each test a few cases, nothing slow, no browser
	NVPROF_KIT_FAST=1 $(pytest) $(PYTEST_ARGS)

test-full: $(VENV)/.installed-test  ## everything: every case, every nsys, many random cases
	NVPROF_KIT_FULL=1 $(pytest) $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-test  ## the tests that need a GPU
	$(bin)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

lint: $(VENV)/.installed-test  ## style, types and shell scripts
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/shellcheck -x recipes/*/*.sh recipes/*/*.bash tools/get-nsys tools/get-ncu tools/get-engines tools/check-release .ci/run

bench: $(VENV)/.installed-test  ## measure: speed against nsys, cost of a range
	@for script in tests/bench/bench_*.py; do echo "== $$script"; $(bin)/python $$script || exit 1; done

fuzz: $(VENV)/.installed-test  ## break captures of every format in 12,000 ways and judge every answer
	cd tests && PYTHONPATH=$(CURDIR):. $(abspath $(bin))/python -m fuzz.fuzz $(FUZZ_ARGS)

site: $(VENV)/.installed-test  ## build the documentation into site/, strictly: a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict --quiet

serve: $(VENV)/.installed-test  ## show the documentation while it is written, at http://127.0.0.1:8000
	$(bin)/mkdocs serve

clean:
	rm -rf $(VENV) $(DEMO)

# torch comes first and only where it is missing: a build for CUDA that is there already stays
$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV): nvprof-kit and $(TORCH)"
	@test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@$(bin)/python -c 'import torch' 2>/dev/null || $(pip) $(TORCH)
	@$(pip) --editable .
	@$(bin)/python -m compileall -q nvprof_kit # as pip does with what is not editable
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing into $(VENV): what the tests need"
	@$(pip) 'pip>=25.1' # the first that installs groups
	@$(pip) --editable . --group test --group lint
	@touch $@

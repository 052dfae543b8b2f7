# What a newcomer and CI run. Everything is installed into $(VENV); nothing else on the machine changes.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO ?= demo-output
PYTEST_ARGS ?=
FUZZ_ARGS ?= --cases 12000

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install -qq

.PHONY: demo test lint bench docs fuzz clean

demo: $(VENV)/.installed  ## train a small transformer under the embedded recorder and print what each layer costs
	@mkdir -p $(DEMO)
	KINETO_LOG_LEVEL=6 $(bin)/nvprof-kit record -o $(DEMO)/run.json.gz -- $(bin)/python examples/tiny_transformer.py
	@$(bin)/nvprof-kit layers $(DEMO)/run.json.gz -o $(DEMO)/layers.csv
	@$(bin)/nvprof-kit layers $(DEMO)/run.json.gz -o $(DEMO)/layers.png
	$(bin)/nvprof-kit layers $(DEMO)/run.json.gz
	@printf '\n%s/ holds the trace (run.json.gz), the table (layers.csv) and the plot (layers.png).\n' "$(DEMO)"

test: $(VENV)/.installed-test  ## run every test that this machine can run
	$(bin)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-test  ## style, types and shell scripts
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/shellcheck -x recipes/*/*.sh recipes/*/*.bash recipes/*.bash .ci/run

bench: $(VENV)/.installed-test  ## measure: speed against nsys, cost of a range
	@for script in tests/bench/bench_*.py; do echo "== $$script"; $(bin)/python $$script || exit 1; done

fuzz: $(VENV)/.installed-test  ## break captures of every format in 12,000 ways and judge every answer
	cd tests && PYTHONPATH=$(CURDIR):. $(abspath $(bin))/python -m fuzz.fuzz $(FUZZ_ARGS)

docs: $(VENV)/.installed  ## write the help of the verbs and the meaning of the columns into docs/
	$(bin)/python docs/generate.py

clean:
	rm -rf $(VENV) $(DEMO)

# torch comes first and only where it is missing: a build for CUDA that is there already stays
$(VENV)/.installed: pyproject.toml hatch_build.py $(wildcard nvprof_kit/instrument/ranges/ranges_c/*)
	@echo "installing into $(VENV): nvprof-kit and $(TORCH)"
	@test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	@$(bin)/python -c 'import torch' 2>/dev/null || $(pip) $(TORCH)
	@$(pip) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing into $(VENV): what the tests need"
	@$(pip) --editable '.[test,lint]'
	@touch $@

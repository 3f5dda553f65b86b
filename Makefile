# From a bare checkout: `make train` trains the speech example, `make test` runs the tests.
# All installs go into a virtual environment of this folder, at the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
TRAIN_ARGS ?=
BENCHMARK_ARGS ?=

# Threads that wait without spinning: they share few cores with the compiler's processes.
export OMP_WAIT_POLICY := PASSIVE

bin := $(VENV)/bin
install := $(bin)/python -m pip install --quiet --constraint constraints.txt

.PHONY: train test sanitize lint format benchmark wheel clean

train: $(VENV)/example.installed
	$(if $(findstring --data,$(TRAIN_ARGS)),,$(bin)/python -m examples.speech.fetch)
	$(bin)/python -m examples.speech.train $(TRAIN_ARGS)

# One thread: the tests' tensors are too small to gain from more.  Triton's interpreter runs beside the other tests.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/test.installed
	TRITON_INTERPRET=1 RNNT_TEST_BACKENDS=triton $(bin)/python -m pytest -m triton >$(VENV)/interpreter.txt 2>&1 & \
	$(bin)/python -m pytest; suite=$$?; \
	wait $$!; interpreter=$$?; \
	cat $(VENV)/interpreter.txt; \
	test $$suite -eq 0 && test $$interpreter -eq 0

sanitize: $(VENV)/test.installed
	PYTHON=$(bin)/python tests/sanitizer.sh

lint: $(VENV)/lint.installed
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy

format: $(VENV)/lint.installed
	$(bin)/ruff check --fix
	$(bin)/ruff format

benchmark: $(VENV)/test.installed
	$(bin)/python -m pytest tests/benchmarks $(BENCHMARK_ARGS)

wheel: $(VENV)/pyvenv.cfg
	$(bin)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# The tests cover the example, and mypy reads the types of all that is installed.
$(VENV)/example.installed: extras := example
$(VENV)/test.installed: extras := test,example,transformers
$(VENV)/lint.installed: extras := test,example,lint

$(VENV)/%.installed: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	$(install) --editable '.[$(extras)]'
	touch $@

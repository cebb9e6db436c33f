# `make` or `make help` lists the commands. Everything runs in .venv, which `make install` creates.

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint typecheck unit functional parity parity-nd bench bench-report gpu-test compatibility wheel clean clean-demo

PYTHON := .venv/bin/python
STAMP := .venv/.installed
DEMO_FLAGS ?=
PARITY_FLAGS ?=
BENCH_FLAGS ?=
PYTEST_FLAGS ?=
PYTEST := $(PYTHON) -m pytest $(PYTEST_FLAGS)

# Recreate a .venv whose interpreter is gone.
ifneq ($(wildcard $(STAMP)),)
ifneq ($(shell $(PYTHON) -c 'print("runs")' 2>/dev/null),runs)
$(shell rm -rf .venv)
endif
endif

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## create .venv with pinned dependencies and this project (editable); does nothing if it is up to date

$(STAMP): constraints.txt pyproject.toml setup.py
	@python="$$(scripts/find_python.sh)" || exit 2; \
	$(PYTHON) -c '' 2>/dev/null || { echo "creating .venv with $$python"; "$$python" -m venv --clear .venv; }
	@echo "installing the pinned dependencies (some GB, a few minutes the first time)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	@touch $(STAMP)

demo: install ## train a small GPT on Python's standard library; a second run resumes (DEMO_FLAGS="--iterations 100")
	@$(PYTHON) examples/demo/run.py $(DEMO_FLAGS)

test: lint typecheck unit functional ## run before every commit: lint, types, unit tests, short functional tests

test-slow: install ## the tests marked slow; CI runs them after make test
	$(PYTEST) tests -m slow

lint: install ## ruff (style, annotations, docstrings, sizes, format) and import-linter (direction of imports)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	.venv/bin/lint-imports --no-cache --no-logo

typecheck: install ## check types with mypy
	$(PYTHON) -m mypy

unit: install ## run the unit tests (PYTEST_FLAGS="-k layout")
	$(PYTEST) tests/unit_tests -m "not slow" -n 2 --dist worksteal

functional: install ## run the functional tests: training runs, checkpoints, command lines
	$(PYTEST) tests/functional_tests -m "not slow" -n 2 --dist loadfile

parity: install ## train with Megatron's DDP and with each strategy in Megatron's loop, and compare (PARITY_FLAGS="--ranks 2")
	@$(PYTHON) -W ignore tools/parity.py $(PARITY_FLAGS)

parity-nd: install ## parity combined with tensor, pipeline, context and expert parallelism; write docs/parallelism.md (PARITY_FLAGS="--only TP")
	@$(PYTHON) -W ignore tools/parity_nd.py --markdown docs/parallelism.md $(PARITY_FLAGS)

bench: install ## benchmark beside FSDP2, the original and DDP; write docs/performance_tables.md (BENCH_FLAGS="--only step,memory --quick")
	@status=0; $(PYTHON) -W ignore -m benchmarks $(BENCH_FLAGS) || status=$$?; $(PYTHON) -m benchmarks.report; exit $$status

bench-report: install ## write docs/performance_tables.md from benchmarks/results
	$(PYTHON) -m benchmarks.report

gpu-test: install ## run the unit tests on CUDA: one rank over NCCL, several over gloo; skipped without a device
	FSDP_TEST_DEVICE=cuda $(PYTEST) tests/unit_tests

compatibility: install ## run all tests, and write docs/compatibility.md from their results
	rm -f docs/compatibility.json
	$(PYTEST) tests --results docs/compatibility.json --deselect tests/unit_tests/test_pages.py::test_compatibility
	$(PYTHON) tools/compatibility_table.py > docs/compatibility.md

wheel: install ## build the wheel into dist/
	rm -rf build
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean-demo: ## remove the demo's output
	rm -rf demo_output

clean: clean-demo ## remove .venv, the demo's output, build outputs and caches
	rm -rf .venv .bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

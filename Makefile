# `make` or `make help` lists the commands. Everything runs in .venv, which `make install` creates.

.DEFAULT_GOAL := help
.PHONY: help install demo test test-merge test-all lint typecheck quick evidence torch-versions torch-reduced python-versions mcore-versions parity fuzz bench bench-report docs docs-serve gpu-test gpu-checks gpu-bench cluster-test compatibility dist wheel clean clean-demo

PYTHON := .venv/bin/python
STAMP := .venv/.installed
DEMO_FLAGS ?=
PARITY_FLAGS ?= --only "data parallel" --iterations 20
FUZZ_FLAGS ?=
BENCH_FLAGS ?=
PYTEST_FLAGS ?=
# Without the theme's notice of its successor, and without warnings about the code of other packages.
MKDOCS := NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore .venv/bin/mkdocs
PYTEST := $(PYTHON) -m pytest $(PYTEST_FLAGS)

# The versions of torch that are tested in addition to the one in constraints.txt, oldest first. TRIED_TORCH in
# megatron/fsdp/version.py lists all of them.
TORCH_VERSIONS := 2.11.0 2.15.0
TORCH_STAMPS := $(TORCH_VERSIONS:%=.venv-torch-%/.installed)
# The tests of what depends on torch's internals.
TORCH_TESTS := $(addprefix tests/unit_tests/,$(patsubst %,checkpoint/test_%.py,backend safe_pickle saving) mcore/test_patches.py mcore/test_uneven_dtensor.py \
	$(patsubst %,test_%.py,clipping compile deferred deletion exceptions export fsdp2 fsdp2_interface fsdp2_state \
	gradient_hooks host_pool meta_device mixed_precision offload optimizer_classes optimizers ragged_dtensor reads \
	resuming state_dict tensor_parallel training versions))

# A machine with a GPU may have no registry: these commands use the Python that has torch, and install nothing.
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(PYTHON),python3)
GPU_CHECKS_FLAGS ?=
GPU_TEST_DEVICE ?= cuda
GPU_TESTS ?= tests/unit_tests
CLUSTER_FLAGS ?=

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
	@scripts/install.sh $(PYTHON) --constraint constraints.txt --editable '.[demo,dev]'
	@touch $(STAMP)

demo: install ## train a small GPT on Python's standard library; a second run resumes (DEMO_FLAGS="--iterations 100")
	@$(PYTHON) examples/demo/run.py $(DEMO_FLAGS)

test: install ## run before every commit: lint, types, quick tests. All of them run, whichever fails
	@failed=; for part in lint typecheck quick; do $(MAKE) $$part || failed="$$failed $$part"; done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

test-merge: install .ray/.installed ## the tests that CI runs after make test: other strategies, formats, frameworks, code of the docs
	$(PYTEST) tests/unit_tests -m merge -n 2 --dist worksteal
	$(PYTEST) tests/functional_tests -m merge -n 2 --dist loadfile

# Ray, and what it needs and .venv lacks, in a folder that one test uses.
.ray/.installed: $(STAMP) Makefile
	rm -rf .ray
	@echo "installing Ray into .ray"
	@$(PYTHON) -m pip install --quiet --no-deps --target .ray ray==2.60.0 msgpack==1.2.4 tensorboardX==2.6.5
	@touch $@

test-all: .ray/.installed lint typecheck torch-versions ## everything, before a release: all tests, all versions of torch, Python and megatron-core, parity
	$(PYTEST) tests/functional_tests -n 2 --dist loadfile
	$(MAKE) parity PARITY_FLAGS="--markdown out/parity.md"

evidence: install ## record which arcs of megatron/ tests reach, into .evidence, and print what only the tests of CI reach
	rm -rf .evidence
	$(PYTEST) tests -m "not slow" -n 2 --dist worksteal --evidence .evidence
	$(PYTHON) -m tests.evidence .evidence

lint: install ## ruff (style, annotations, docstrings, sizes, format) and import-linter (direction of imports)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	.venv/bin/lint-imports --no-cache --no-logo

typecheck: install ## check types with mypy
	$(PYTHON) -m mypy

quick: install ## run the quick tests (PYTEST_FLAGS="-k layout"); tests/tiers.py says which these are
	$(PYTEST) tests -m "not slow and not merge" -n 2 --dist worksteal

torch-versions: install $(TORCH_STAMPS) ## run all unit tests on every supported version of torch, each in an environment of its own (5 GB each)
	$(PYTEST) tests/unit_tests -n 2 --dist worksteal
	for version in $(TORCH_VERSIONS); do \
		.venv-torch-$$version/bin/python -m pytest $(PYTEST_FLAGS) tests/unit_tests -n 2 --dist worksteal || exit 1; \
	done

torch-reduced: $(TORCH_STAMPS) ## run the unit tests that depend on torch's internals, on the oldest and the newest version; CI runs this
	for version in $(TORCH_VERSIONS); do \
		.venv-torch-$$version/bin/python -m pytest $(PYTEST_FLAGS) $(TORCH_TESTS) -m "not slow and not merge" -n 2 --dist worksteal || exit 1; \
	done

python-versions: install ## import, train, save and resume with the wheel, without extras, on every supported version of Python
	$(PYTEST) tests/functional_tests/test_python_versions.py tests/functional_tests/test_packaging.py

mcore-versions: install ## train, save and resume with other versions of megatron-core from PyPI
	$(PYTEST) tests/functional_tests/test_megatron_versions.py

$(TORCH_STAMPS): .venv-torch-%/.installed: constraints.txt pyproject.toml
	@python="$$(scripts/find_python.sh)" || exit 2; "$$python" -m venv --clear $(@D)
	@echo "installing torch $* into $(@D)"
	@grep -vE '^(torch|triton|setuptools|cuda-|nvidia-)' constraints.txt >$(@D)/constraints.txt
	@# The variable takes the place of constraints in this machine's pip configuration, which may exclude the version.
	@PIP_CONSTRAINT=$(@D)/constraints.txt scripts/install.sh $(@D)/bin/python --constraint $(@D)/constraints.txt 'torch==$*' --editable '.[mcore,convert,test]'
	@touch $@

parity: install ## train with Megatron's DDP and with FSDP in its loop, and compare; all cases with PARITY_FLAGS="--markdown out/parity.md"
	@$(PYTHON) -W ignore scripts/parity.py $(PARITY_FLAGS)

fuzz: install ## run random programs plain and sharded, and compare; write fuzz_output/table.md (FUZZ_FLAGS="--programs 500")
	@$(PYTHON) -W ignore -m tests.fuzz $(FUZZ_FLAGS)

bench: install ## benchmark against FSDP2, NVIDIA's and DDP; write out/benchmarks, docs/status.md (BENCH_FLAGS="--only step,memory --quick")
	@status=0; $(PYTHON) -W ignore -m benchmarks $(BENCH_FLAGS) || status=$$?; $(PYTHON) -m benchmarks.report; exit $$status

bench-report: install ## write the tables, plots and docs/status.md from the results in out/benchmarks
	$(PYTHON) -m benchmarks.report

docs: install ## build the documentation site into site/ without warnings; run its code blocks and look at it in a browser
	$(MKDOCS) build --strict
	$(PYTEST) tests/functional_tests/test_docs_code.py tests/functional_tests/test_docs_site.py -n 2 --dist loadfile

docs-serve: install ## serve the documentation on port 8000, and build it again when a page changes
	$(MKDOCS) serve

gpu-test: ## run the unit tests on CUDA, 9 minutes of them at a time, over NCCL on one device (GPU_PYTHON=python3)
	FSDP_TEST_DEVICE=$(GPU_TEST_DEVICE) PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest -p tests.gpu.resume --finished gpu_checks/tests.finished \
		--seconds 500 -n 8 -m "not slow" $(PYTEST_FLAGS) $(GPU_TESTS)

gpu-checks: ## run the scripts of tests/gpu, 9 minutes at a time: a verdict each, details in gpu_checks/ (GPU_CHECKS_FLAGS="--only memory")
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m tests.gpu --out gpu_checks $(GPU_CHECKS_FLAGS)

gpu-bench: ## compare step time, memory and kernels on a GPU with FSDP2 and NVIDIA's engine, in 8 minutes (BENCH_FLAGS="--full")
	PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -W ignore -m benchmarks --only gpu --add $(BENCH_FLAGS)

cluster-test: install ## stop, kill and cut off jobs on a Slurm cluster of two nodes here, as root (INSTALL=1 installs Slurm; CLUSTER_FLAGS="--only requeue")
	$(PYTHON) -m tests.cluster $(if $(INSTALL),--install) $(CLUSTER_FLAGS)

compatibility: install .ray/.installed ## run all tests, and write out/compatibility.md and docs/status.md from their results
	mkdir -p out
	rm -f out/compatibility.json
	$(PYTEST) tests -n 2 --dist worksteal --results out/compatibility.json
	$(PYTHON) scripts/compatibility_table.py

dist: install ## build the sdist, and the wheel from it, into dist/
	rm -rf dist *.egg-info
	$(PYTHON) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

wheel: install ## build the wheel into dist/
	rm -rf build
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean-demo: ## remove the demo's output
	rm -rf demo_output

clean: clean-demo ## remove .venv, the demo's output, build outputs and caches
	rm -rf .venv .venv-torch-* .ray .bench .evidence gpu_checks cluster_test site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

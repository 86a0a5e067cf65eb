# ktft from a bare checkout: every target first makes what it needs, once, in .venv; for tests of serving also in
# .venv-serve, since vLLM on the CPU needs a transformers that LLaMA-Factory refuses, and for tests of the newest
# transformers, PEFT and TRL in .venv-newest.
#   make demo    a small MoE, trained with LoRA through llamafactory-cli
#   make test    the tests         make lint    style, types, C++ format
#   make test-all  also tests that install other environments, and the whole matrix of kernels
#   make bench   kernel timings    make native  environment and C++ core, nothing else
#   make newest  the environment with the newest transformers, PEFT and TRL
#   make sglang  an environment with SGLang on the CPU, in .venv-sglang, and the tests of serving with it
#   make docs    the pages as a site, in build/site; its tools have an environment of their own, .venv-docs
#   make wheel   wheels and the source distribution, in dist; its tools have .venv-wheel
#   make sanitize  the kernel tests under AddressSanitizer, UBSan and ThreadSanitizer
# With a CUDA torch: make STUBS= TORCH='torch==2.13.0 torchvision torchaudio'

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Unpinned, LLaMA-Factory pulls the newest torch with all of CUDA: name torch in every command that resolves it.
TORCH ?= torch==2.13.0
# torchvision and torchaudio have no CPU builds to match; LLaMA-Factory needs the second to import.
STUBS ?= ./ci/stubs/torchvision ./ci/stubs/torchaudio
EXTRAS := llamafactory dev
# vLLM's build for CPUs asks for them too, and text needs none.
SERVE_STUBS ?= $(STUBS) ./ci/stubs/torchcodec
SERVE_VENV ?= .venv-serve
SERVE_BIN := $(SERVE_VENV)/bin
SGLANG_VENV ?= .venv-sglang
NEWEST_VENV ?= .venv-newest
NEWEST_BIN := $(NEWEST_VENV)/bin
# What `make test` runs on both stacks. Of the other tests, `make test-all` runs those that can on the newest too.
NEWEST_TESTS := $(addprefix tests/test_,parity.py families.py adapters.py saved_adapter.py peft_ways.py linear.py \
  quantizer.py schemes.py resume.py trainer.py trl.py export.py hosts.py ranks_tp.py step_order.py recorded.py \
  gateless_models.py calls.py dense.py)
DOCS_VENV ?= .venv-docs
WHEEL_VENV ?= .venv-wheel
# One wheel each, if it is on this machine.
WHEEL_PYTHONS ?= python3.11 python3.12 python3.13
# Tests that run beside each other: `auto` is one for each core, if memory has room (tests/conftest.py).
WORKERS ?= auto

# pip compiles nothing (--no-compile), so each process would compile torch and all else that it imports, for seconds, if
# it could not keep the result.
unexport PYTHONDONTWRITEBYTECODE

# It fills the other environments too (`--python`). -qq still shows errors, including those of a failed compilation.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f)
CXX_SOURCES := $(filter %.h %.cc %.inc,$(NATIVE_SOURCES))

.PHONY: demo test test-all lint bench sanitize native serving sglang newest docs wheel format clean

demo: native
	$(BIN)/python examples/demo/run.py

# All parts run, even if one fails. The first stack's tests begin as soon as there is an environment for them, for which
# pip has one core while the other compiles the C++ core. Beside them the other environments are filled, and then have
# their own tests: the servers' spend much of their start waiting. Their output comes last. What a shell starts beside
# itself ignores Ctrl-C, hence the trap.
BESIDE := build/test-beside.log
# Not MAKE itself in the line that runs tests: `make -n` would run it.
FILL = $(MAKE) --no-print-directory -j 2
test-all: MARKS := -m ''
test-all: NEWEST_TESTS := tests --ignore tests/serve
test test-all:
	@$(FILL) native
	@mkdir -p build; trap 'kill 0' INT; failed=0; set -x; \
	{ $(FILL) serving newest && { failed=0; \
	  KTFT_TRAINING_BIN=$(abspath $(BIN)) $(SERVE_BIN)/python -m pytest $(MARKS) -n $(WORKERS) tests/serve || failed=1; \
	  $(NEWEST_BIN)/python -m pytest $(MARKS) -n $(WORKERS) $(NEWEST_TESTS) || failed=1; \
	  exit $$failed; }; } > $(BESIDE) 2>&1 & \
	$(BIN)/python -m pytest $(MARKS) -n $(WORKERS) tests --ignore tests/serve || failed=1; \
	wait $$! || failed=1; cat $(BESIDE); exit $$failed

lint: native
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: native
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: native
	$(BIN)/ktft bench kernels

# An editable install holds one core at a time: the sanitized ones replace it, and the next target builds it anew.
SANITIZED := address,undefined:libasan.so thread:libtsan.so
sanitize: native
	@rm $(VENV)/.native
	@for pair in $(SANITIZED); do \
	  kind=$${pair%:*}; echo "ktft: C++ core with $$kind sanitizer ..."; \
	  $(PIP) install --no-build-isolation --no-deps --editable . \
	    -Cbuild-dir=build/sanitize-$$kind -Ccmake.define.KTFT_SANITIZE=$$kind || exit 1; \
	  OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=exitcode=66:ignore_noninstrumented_modules=1 \
	    LD_PRELOAD="$$($(CXX) -print-file-name=$${pair#*:}) $$($(CXX) -print-file-name=libstdc++.so)" \
	    $(BIN)/python -m pytest -m '' -p no:cacheprovider tests/test_kernels.py tests/test_fixed_point.py tests/test_swiglu.py tests/test_dropout.py tests/test_w8a8.py tests/test_adam.py tests/test_norms.py tests/test_hybrid.py || exit 1; \
	done

native: $(VENV)/.native

# What builds the C++ core comes first, so that the core is compiled while pip installs the rest. The pip that comes with
# Python 3.11 needs twice the time for that: it compares each file of an index with a thousand tags, one by one.
$(VENV)/.tools: pyproject.toml ci/requirements.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "ktft needs Python 3.11 to 3.13, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.11"; exit 1; }
	@echo "ktft: environment in $(VENV) (2 GB to download the first time, some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python ci/requirements.py --build > $(VENV)/tools.txt
	@$(PIP) install --upgrade 'pip>=25,<28'
	@$(PIP) install -r $(VENV)/tools.txt
	@touch $@

# --no-compile: Python compiles what is imported, a fraction of what is installed. These modules are imported once, each
# in a process, before any test: tests that start beside each other would each compile the same.
COMPILE = @for module in $(2); do $(1)/python -c "import $$module" > /dev/null 2>&1 & done; wait

$(VENV)/.environment: $(VENV)/.tools $(shell find ci/stubs -name '*.toml' -o -name '*.py')
	@$(BIN)/python ci/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	@$(PIP) install --no-compile $(TORCH) $(STUBS) -r $(VENV)/requirements.txt
	$(call COMPILE,$(BIN),llamafactory.train.tuner datasets scipy.stats)
	@touch $@

# One editable wheel for all environments. The build folder is kept, so only what changed in csrc is compiled again.
build/editable/.made: $(VENV)/.tools $(NATIVE_SOURCES)
	@echo "ktft: C++ core ..."
	@rm -rf build/editable && mkdir -p build/editable
	@$(BIN)/python -c 'from scikit_build_core.build import build_editable; build_editable("build/editable")' > build/editable.log 2>&1 || { cat build/editable.log; exit 1; }
	@touch $@

$(VENV)/.native $(SERVE_VENV)/.native $(SGLANG_VENV)/.native $(NEWEST_VENV)/.native: %/.native: %/.environment build/editable/.made
	@$(PIP) --python $*/bin/python install --no-deps --force-reinstall build/editable/*.whl
	@touch $@

serving: $(SERVE_VENV)/.native

# After the first environment, so that what they share is downloaded once.
$(SERVE_VENV)/.environment: $(VENV)/.environment
	@echo "ktft: environment for serving in $(SERVE_VENV) (0.6 GB to download the first time, some minutes) ..."
	@$(PYTHON) -m venv $(SERVE_VENV)
	@$(BIN)/python ci/requirements.py serve-cpu test > $(SERVE_VENV)/requirements.txt
	@$(PIP) --python $(SERVE_BIN)/python install --no-compile $(TORCH) $(SERVE_STUBS) -r $(SERVE_VENV)/requirements.txt
	$(call COMPILE,$(SERVE_BIN),vllm.entrypoints.openai.api_server)
	@touch $@

# SGLang's requirements have gigabytes for GPUs, so what it imports on a CPU is listed in ci. `make test` leaves it out.
sglang: $(SGLANG_VENV)/.native
	$(SGLANG_VENV)/bin/python -m pytest tests/serve/test_sglang.py tests/serve/test_sglang_server.py

$(SGLANG_VENV)/.environment: $(VENV)/.tools pyproject.toml ci/requirements.py ci/sglang-cpu.txt
	@echo "ktft: environment with SGLang in $(SGLANG_VENV) (0.6 GB to download the first time, some minutes) ..."
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(PYTHON) ci/requirements.py test > $(SGLANG_VENV)/requirements.txt
	@$(PIP) --python $(SGLANG_VENV)/bin/python install --no-compile $(TORCH) $(SERVE_STUBS) -r $(SGLANG_VENV)/requirements.txt -r ci/sglang-cpu.txt
	@$(PIP) --python $(SGLANG_VENV)/bin/python install --no-compile --no-deps 'sglang>=0.5.17,<0.5.18'
	@touch $@

newest: $(NEWEST_VENV)/.native

$(NEWEST_VENV)/.environment: $(VENV)/.environment
	@echo "ktft: environment with the newest transformers, PEFT and TRL in $(NEWEST_VENV) (0.4 GB to download the first time) ..."
	@$(PYTHON) -m venv $(NEWEST_VENV)
	@$(BIN)/python ci/requirements.py trl dev > $(NEWEST_VENV)/requirements.txt
	@$(PIP) --python $(NEWEST_BIN)/python install --no-compile $(TORCH) -r $(NEWEST_VENV)/requirements.txt
	$(call COMPILE,$(NEWEST_BIN),trl.trainer.sft_trainer)
	@touch $@

# Strict: a broken link fails. The variable silences an advertisement.
docs: $(DOCS_VENV)/.environment
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet
	@echo "ktft: build/site/index.html"

$(DOCS_VENV)/.environment: pyproject.toml ci/requirements.py
	@echo "ktft: environment for the pages in $(DOCS_VENV) (some 10 MB to download the first time) ..."
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python ci/requirements.py --only docs > $(DOCS_VENV)/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check -qq install -r $(DOCS_VENV)/requirements.txt
	@touch $@

# Wheels are built from the source distribution, which shows that it builds. A wheel gets the tag of the oldest glibc
# that has what it uses: for a release this runs in an image with an old one (docs/dev/releasing.md).
wheel: $(WHEEL_VENV)/.environment
	@rm -rf build/wheels dist
	@echo "ktft: source distribution ..."
	@$(WHEEL_VENV)/bin/python -m build --sdist --outdir dist . > build/sdist.log 2>&1 || { cat build/sdist.log; exit 1; }
	@for name in $(WHEEL_PYTHONS); do \
	  python=$$($$name -c 'import sys; print(sys.executable)' 2> /dev/null) || { echo "ktft: $$name is not here: skipped"; continue; }; \
	  echo "ktft: wheel for $$($$python -V) ..."; \
	  $(WHEEL_VENV)/bin/python -m pip --python $$python --disable-pip-version-check -qq wheel --no-deps --no-cache-dir \
	    --wheel-dir build/wheels --config-settings=cmake.define.KTFT_STATIC_RUNTIME=ON dist/ktft-*.tar.gz || exit 1; \
	done
	@ls build/wheels/*.whl > /dev/null 2>&1 || { echo "ktft: none of these is here: $(WHEEL_PYTHONS)"; exit 1; }
	@PATH=$(abspath $(WHEEL_VENV))/bin:$$PATH; \
	auditwheel repair --wheel-dir dist build/wheels/*.whl && for file in dist/*.whl; do auditwheel show $$file || exit 1; done
	@ls -l dist

$(WHEEL_VENV)/.environment: pyproject.toml ci/requirements.py
	@echo "ktft: environment for wheels in $(WHEEL_VENV) (some MB to download the first time) ..."
	@$(PYTHON) -m venv $(WHEEL_VENV)
	@$(WHEEL_VENV)/bin/python ci/requirements.py --only wheel > $(WHEEL_VENV)/requirements.txt
	@$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check -qq install -r $(WHEEL_VENV)/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(SERVE_VENV) $(SGLANG_VENV) $(NEWEST_VENV) $(DOCS_VENV) $(WHEEL_VENV) build dist

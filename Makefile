# jattn: `make demo` and `make test` need nothing but python3 (3.11 or newer), make and a package index for pip.
#
# Compiled programs kept between runs, several times faster from the second on:    make test CACHE=.jax-cache
# Another interpreter in an environment of its own:   make test PYTHON=python3.12 VENV=.venv-312
# A given JAX in an environment of its own:           make test PYTHON=python3.12 VENV=.venv-jax JAX=0.11.2

PYTHON  ?= python3
VENV    ?= .venv
JAX     ?=
WORKERS ?= 2
CACHE   ?=
ARGS    ?=

PY    := $(VENV)/bin/python
PIP   := "$(PY)" -m pip --disable-pip-version-check $(if $(CI),--quiet)
PIN   := $(if $(JAX),"jax==$(JAX)" "jaxlib==$(JAX)")
KEEP  := $(if $(CACHE),JAX_COMPILATION_CACHE_DIR="$(CACHE)" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0)
DEMO  := $(VENV)/.ready-demo
READY := $(VENV)/.ready
TOOLS := $(VENV)/.ready-tools
WITNESS := $(VENV)/.ready-parity
SPHINX := $(VENV)/.ready-docs
WHEELS := $(VENV)/.ready-wheels
RAY := $(VENV)/.ready-ray
LIBTPU := $(VENV)/.ready-libtpu
CUDA := $(VENV)/.ready-cuda

PLATFORMS ?= manylinux_2_28_x86_64 manylinux_2_28_aarch64

ifneq ($(words $(VENV)),1)
$(error VENV="$(VENV)" has a space or is empty; make needs a path without one)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test parity lint format types imports notebooks docs bench wheel sanitize fuzz-server arm64 \
  replicas tpu-aot gpu-aot check clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || grep '## ' Makefile

demo: $(or $(wildcard $(READY)),$(DEMO))  ## compare every backend with numpy, then serve a small model and check it (1 minute)
	@"$(PY)" -m jattn demo $(ARGS)

# Figures of two cores without a cache of compiled programs. tests/quick.py chooses the quick subset.
WHOLE := the whole suite, about 9000 tests, about 50 minutes on two cores
QUICK := the quick subset, about 2000 tests, about 3 minutes on two cores
QUICK_ARGS := -m quick $$("$(PY)" -m tests.quick)
SUITE  = $(if $(ARGS),$(if $(filter-out quick,$(ARGS)),pytest $(ARGS),$(QUICK)),$(WHOLE); for a subset in 3 minutes: make test ARGS=quick)

test: $(READY)  ## the whole suite (50 minutes on two cores); ARGS=quick: a subset (3 minutes); ARGS='-k window'
	$(info On $(WORKERS) workers: $(SUITE).)
	@$(KEEP) "$(PY)" -m pytest -n $(WORKERS) --dist worksteal $(if $(filter-out quick,$(ARGS)),$(ARGS),$(if $(ARGS),$(QUICK_ARGS)))

# The files that need the witness; the others of tests/models are part of `make test`.
WITH_WITNESS = $(shell grep -rlE 'importorskip."(transformers|torch|compressed_tensors)"' --include=test_*.py tests)

parity: $(WITNESS)  ## compare every family of models with transformers, which it installs
	@$(KEEP) "$(PY)" -m pytest -n $(WORKERS) --dist loadscope $(WITH_WITNESS) $(ARGS)

lint: $(TOOLS)  ## ruff: lint rules and format
	@"$(PY)" -m ruff check . && "$(PY)" -m ruff format --check .

format: $(TOOLS)  ## ruff: repair what it can, and format
	@"$(PY)" -m ruff check --fix . && "$(PY)" -m ruff format .

types: $(TOOLS)  ## check types with pyright
	@"$(PY)" -m pyright --pythonpath "$(PY)" $(ARGS)

imports: $(TOOLS)  ## check that each package imports only what it may
	@"$(VENV)/bin/lint-imports" --no-cache

notebooks: $(TOOLS)  ## execute every notebook; ARGS=--write keeps the outputs
	@"$(PY)" notebooks/run.py $(ARGS)

docs: $(SPHINX)  ## the documentation site, into site/html; a broken link or reference fails it
	@JAX_PLATFORMS=cpu "$(PY)" docs/generate.py --site

bench: $(READY)  ## run the benchmarks, each with a correctness check; ARGS='--case ... --backend ...'
	@"$(PY)" -m benchmarks.run $(ARGS)

wheel: $(WHEELS)  ## wheels in dist/ for Linux, x86_64 and aarch64, with the native CPU kernels inside; checked
	@rm -rf build dist
	@for platform in $(PLATFORMS); do \
	  echo "[+] dist/: $$platform (a minute or two: zig compiles its C++ library, too)"; \
	  $(PIP) wheel --quiet --no-deps --wheel-dir dist --config-settings=--build-option=--plat-name=$$platform . || exit 1; \
	done
	@"$(PY)" .ci/audit.py dist/*.whl

# JAX itself is not built for sanitizers: AddressSanitizer must come before it, and its leaks are not ours.
SANITIZED := JATTN_NATIVE_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
PRELOAD    = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)"
FUZZ      := -m pallas_kernels.cpu.native.fuzz
SECONDS   ?= 20

sanitize: $(READY)  ## fuzz and test the native kernels under sanitizers; SECONDS=600 for longer
	@"$(PY)" $(FUZZ) --sanitize address,undefined --seconds $(SECONDS)
	@"$(PY)" $(FUZZ) --sanitize thread --callers 4 --seconds $(SECONDS)
	@$(SANITIZED) "$(PY)" -c "from pallas_kernels.cpu.native import build; print(build.library().path)"
	@$(SANITIZED) $(PRELOAD) ASAN_OPTIONS=detect_leaks=0 "$(PY)" -m pytest -q tests/kernels/cpu/test_native.py \
	  tests/kernels/cpu/test_native_write.py tests/kernels/cpu/test_native_hostile.py $(ARGS)

fuzz-server: $(READY)  ## fuzz a real server with hostile clients; SECONDS=600 for longer, ARGS='--bodies 20000 --seed 7'
	@JAX_PLATFORMS=cpu $(KEEP) "$(PY)" -m tests.serve.fuzz --seconds $(SECONDS) $(ARGS)

arm64: $(READY)  ## cross-compile the NEON kernels, run them under qemu and compare with a reference
	@"$(PY)" $(FUZZ) --cross aarch64 --seconds $(SECONDS)

replicas: $(RAY)  ## test two replicas under Ray Serve, which it installs; better in an environment of its own
	@"$(PY)" -m pytest -n 0 tests/serve/test_replicas.py $(ARGS)

tpu-aot: $(LIBTPU)  ## compile the engine and the kernels for TPUs with libtpu, which it installs; no TPU is needed
	@"$(PY)" -m pytest -n 0 $(or $(ARGS),tests/benchmarks/test_tpu_engine.py tests/benchmarks/test_tpu_options.py \
	  tests/kernels/tpu/test_lowering.py)

gpu-aot: $(CUDA)  ## compile the kernels for six GPUs that are not here; registers and spills as recorded (Python 3.12)
	@"$(PY)" -m pytest -n $(WORKERS) $(or $(ARGS),tests/kernels/gpu/test_registers.py)

check: test lint types imports notebooks  ## test, lint, types, imports and notebooks; .ci/run does more

clean:  ## remove the environments and caches
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info

# The environment: made once, renewed when pyproject.toml changes. A half-made or moved one is made again.
# EXTRAS: of pyproject.toml. PACKAGES: the same in words, and the usual time. ABOUT: what the target itself will do.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jattn needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1);" \
	       "name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) .ci/environment.py --venv "$(VENV)" --extras "$(EXTRAS)" --packages "$(PACKAGES)" \
	  --target "$(firstword $(MAKECMDGOALS))" --about "$(ABOUT)" -- $(PIN)
	@touch "$@"
endef

$(DEMO): EXTRAS := models
$(DEMO): PACKAGES := JAX and Flax (15 s)
$(DEMO): ABOUT := about 70 s if the C++ kernels must be compiled, else half a minute
$(DEMO): pyproject.toml
	$(install)

$(READY): EXTRAS := test
$(READY): PACKAGES := JAX, Flax and the test tools (20 s)
$(READY): pyproject.toml
	$(install)

$(TOOLS): EXTRAS := test,lint,notebooks
$(TOOLS): PACKAGES := JAX, test, lint, type and notebook tools (40 s)
$(TOOLS): pyproject.toml
	$(install)
	@touch "$(READY)"

$(WITNESS): EXTRAS := test,parity
$(WITNESS): PACKAGES := JAX, test tools, transformers, torch (1 minute)
$(WITNESS): pyproject.toml
	$(install)
	@touch "$(READY)"

$(SPHINX): EXTRAS := test,docs
$(SPHINX): PACKAGES := JAX, test tools and Sphinx (40 s)
$(SPHINX): pyproject.toml
	$(install)
	@touch "$(READY)"

$(RAY): EXTRAS := test,ray
$(RAY): PACKAGES := JAX, test tools and Ray Serve (1 minute)
$(RAY): pyproject.toml
	$(install)
	@touch "$(READY)"

$(LIBTPU): EXTRAS := test
$(LIBTPU): PACKAGES := JAX, test tools and libtpu (40 s)
$(LIBTPU): PIN := "jax==0.10.2" "jaxlib==0.10.2" "libtpu==0.0.51"
$(LIBTPU): pyproject.toml
	$(install)
	@touch "$(READY)"

# JAX's CUDA plugin with two compilers, ptxas and nvJitLink (benchmarks/gpu/registers.py): no cuDNN, NCCL or cuBLAS.
# JAX 0.12 needs Python 3.12.
$(CUDA): EXTRAS := test
$(CUDA): PACKAGES := JAX, its CUDA plugin and ptxas (1 minute)
$(CUDA): PIN := "jax==0.12.*" "jaxlib==0.12.*" "jax-cuda13-plugin==0.12.*" "jax-cuda13-pjrt==0.12.*" \
  "nvidia-cuda-nvcc==13.*" "nvidia-nvjitlink==13.*" nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cupti
$(CUDA): pyproject.toml
	$(install)
	@touch "$(READY)"

$(WHEELS): EXTRAS := test,wheels
$(WHEELS): PACKAGES := JAX, test tools and auditwheel (20 s)
$(WHEELS): pyproject.toml
	$(install)
	@touch "$(READY)"

# jattn: `make demo` and `make test` need nothing but python3 (3.11 or newer) and make.
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
READY := $(VENV)/.ready
TOOLS := $(VENV)/.ready-tools
WITNESS := $(VENV)/.ready-parity
SPHINX := $(VENV)/.ready-docs

.DEFAULT_GOAL := help
.PHONY: help demo test parity lint format types imports notebooks docs bench wheel sanitize fuzz-server arm64 check clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || grep '## ' Makefile

demo: $(READY)  ## a ragged batch through every backend that works here, checked
	@"$(PY)" -m jattn demo $(ARGS)

test: $(READY)  ## the whole suite; ARGS='-k window' for a part of it
	@$(KEEP) "$(PY)" -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

parity: $(WITNESS)  ## every family of models against transformers, which it installs
	@$(KEEP) "$(PY)" -m pytest -n $(WORKERS) --dist loadscope tests/models $(ARGS)

lint: $(TOOLS)  ## ruff: lint rules and format
	@"$(PY)" -m ruff check . && "$(PY)" -m ruff format --check .

format: $(TOOLS)  ## ruff: mend what it can, and format
	@"$(PY)" -m ruff check --fix . && "$(PY)" -m ruff format .

types: $(TOOLS)  ## pyright
	@"$(PY)" -m pyright --pythonpath "$(PY)" $(ARGS)

imports: $(TOOLS)  ## who may import whom
	@"$(VENV)/bin/lint-imports" --no-cache

notebooks: $(TOOLS)  ## execute every notebook; ARGS=--write keeps the outputs
	@"$(PY)" notebooks/run.py $(ARGS)

docs: $(SPHINX)  ## the documentation site, into site/html; a broken link or reference fails it
	@JAX_PLATFORMS=cpu "$(PY)" docs/generate.py --site

bench: $(READY)  ## the benchmarks, each with a correctness check; ARGS='--case ... --backend ...'
	@"$(PY)" -m benchmarks.run $(ARGS)

wheel: $(READY)  ## a wheel in dist/, with the native CPU kernels inside where a compiler is there
	@rm -rf build dist
	@$(PIP) wheel --no-deps --wheel-dir dist .

# JAX itself is not built for sanitizers: AddressSanitizer must come before it, and its leaks are not ours.
SANITIZED := JATTN_NATIVE_FLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
PRELOAD    = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)"
FUZZ      := -m pallas_kernels.cpu.native.fuzz
SECONDS   ?= 20

sanitize: $(READY)  ## the native kernels under sanitizers: fuzzed alone, then their tests; SECONDS=600 for longer
	@"$(PY)" $(FUZZ) --sanitize address,undefined --seconds $(SECONDS)
	@"$(PY)" $(FUZZ) --sanitize thread --callers 4 --seconds $(SECONDS)
	@$(SANITIZED) "$(PY)" -c "from pallas_kernels.cpu.native import build; print(build.library().path)"
	@$(SANITIZED) $(PRELOAD) ASAN_OPTIONS=detect_leaks=0 "$(PY)" -m pytest -q tests/kernels/cpu/test_native.py \
	  tests/kernels/cpu/test_native_write.py tests/kernels/cpu/test_native_hostile.py $(ARGS)

fuzz-server: $(READY)  ## hostile clients against a real server; SECONDS=600 for longer, ARGS='--bodies 20000 --seed 7'
	@JAX_PLATFORMS=cpu $(KEEP) "$(PY)" -m tests.serve.fuzz --seconds $(SECONDS) $(ARGS)

arm64: $(READY)  ## NEON kernels: compiled by a cross compiler, run under qemu, compared with a reference
	@"$(PY)" $(FUZZ) --cross aarch64 --seconds $(SECONDS)

check: test lint types imports notebooks  ## test, lint, types, imports and notebooks; .ci/run does more

clean:  ## remove the environments and caches
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info

# The environment: made once, renewed when pyproject.toml changes. A half-made or moved one is made again.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jattn needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1);" \
	       "name another: make $(firstword $(MAKECMDGOALS)) PYTHON=python3.12" >&2; exit 1; }
	@"$(PY)" -m pip --version >/dev/null 2>&1 || { \
	  echo "[1/2] making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv --clear "$(VENV)" || { \
	    echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; }
	@echo "[2/2] installing jattn, JAX and the test tools into $(VENV) (about half a minute)"
	@$(PIP) install -e ".[test]" $(PIN)
	@touch "$@"

$(TOOLS): $(READY)
	@echo "[+] installing the lint, type and notebook tools into $(VENV) (about half a minute)"
	@$(PIP) install -e ".[test,lint,notebooks]" $(PIN)
	@touch "$@"

$(SPHINX): $(READY)
	@echo "[+] installing sphinx, myst-nb and furo into $(VENV) (about half a minute)"
	@$(PIP) install -e ".[test,docs]" $(PIN)
	@touch "$@"

$(WITNESS): $(READY)
	@echo "[+] installing transformers and torch's CPU build into $(VENV) (about a minute)"
	@$(PIP) install -e ".[test,parity]" $(PIN)
	@touch "$@"

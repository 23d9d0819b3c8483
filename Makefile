# Everything one does with this checkout. `make help` lists the targets; the text after `##` is what it shows.
#
# Two variables choose the environment:
#   TORCH=2.11.0     the torch to build and test against, in a virtual environment of its own
#   VENV=/some/venv  an environment you already have; a torch that is in it stays
# SETUP=no makes `make test-cuda` take what is there, PYTHON and the unisono it finds, and build and download nothing;
# `make docs` then takes the module that is there.

.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

export PIP_QUIET := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
CARGO ?= cargo
DEFAULT_TORCH := 2.15.0
TORCH ?= $(DEFAULT_TORCH)
VENV ?= $(if $(filter $(DEFAULT_TORCH),$(TORCH)),.venv,.venv-torch$(TORCH))
# Extra arguments: `make test-python TEST="tests/python/project/test_ranks.py -k dies"`, `make test-rust TEST=plan::`.
TEST ?=
# Tests that run at the same time: one more than cores, since many wait; of those in Rust, which wait more, two for each core.
PARALLEL ?= $(shell echo $$(($$(nproc) + 1)))
export RUST_TEST_THREADS ?= $(shell echo $$(($$(nproc) * 2)))
# How long `make fuzz` runs each of its targets, and `make world` in all.
SECONDS ?= 20
# The part of PyTorch's tests that `make conformance` runs.
SHARD ?= 1/1
# Where `make install` puts the C library: PREFIX/include, PREFIX/LIBDIR; before both DESTDIR, for packagers.
PREFIX ?= /usr/local
LIBDIR ?= lib
DESTDIR ?=
# Whether the tests install the frameworks above torch (Accelerate, Lightning, DeepSpeed, Ray): 250 MB to download.
FRAMEWORKS ?= yes
SETUP ?= yes
# The targets of `make wheel`: versions of torch or folders with one (all that are supported), and the processor.
TORCHES ?=
MACHINE ?= $(shell uname -m)
# Where `make test-wheel`, `make test-sdist` and `make rehearse` test: pairs of a Python and a torch or none, as 3.12:2.15.0 (all, or what suits sources).
WHEEL_ENVIRONMENTS ?=
# Whether they also build a door by `build-torch` in the first of these with a torch, which the test of all does anyway.
BUILD_TORCH ?= no
# A Python without a GIL, 3.14 or newer, for `make test-free-threaded`.
FREE_THREADED ?=
# The git revision that `make semver` compares with (the tag of the last release).
BASELINE ?=
# Whether `make test-aarch64` and its quick part fail where they cannot run, and do not skip.
REQUIRED ?= no

override VENV := $(abspath $(VENV))
override TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
override PY := $(VENV)/bin/python
# An environment may serve several checkouts, so the stamps carry the checkout they speak for.
override CHECKOUT := $(shell printf %s "$(CURDIR)" | cksum | cut -d' ' -f1)
override PACKAGE_STAMP := $(VENV)/.unisono-$(CHECKOUT)
override WHEEL_TOOLS := $(TARGET)/wheel-tools
override WHEEL_PY := $(WHEEL_TOOLS)/bin/python
override WHEEL_STAMP := $(WHEEL_TOOLS)/.unisono
override INDEX_TOOLS := $(TARGET)/index-tools
override INDEX_STAMP := $(INDEX_TOOLS)/.unisono
override CONDA_TOOLS := $(TARGET)/conda-tools
override CONDA_STAMP := $(CONDA_TOOLS)/.unisono
override DOCS_TOOLS := $(TARGET)/docs-tools
override DOCS_STAMP := $(DOCS_TOOLS)/.unisono
override NVRTC := $(TARGET)/nvrtc
override BENCH_RESULTS := bench-results
# The features are tested, too.
override features = --features unisono/async
override measure = CARGO_TARGET_DIR=$(TARGET) $(PY) -u

override quietly := tools/quietly.sh
override pytest = $(PY) -m pytest -q -rs
override beside := -n $(PARALLEL) --dist worksteal
override with_torch := tools/with-torch.sh $(VENV)
# The scripts of tools/ and rust/capi/ take these from the environment.
export CARGO PYTHON
# The modules are for the stable ABI. Asked for its version, each interpreter would have them compiled anew.
export PYO3_NO_PYTHON := 1

RUST_PACKAGES := $(wildcard rust/*/Cargo.toml)
# The modules for Python have no tests in Rust: a program that links them wants an interpreter.
UNIT_TESTED := unisono unisono-plan unisono-reduce unisono-capi unisono-launch
KERNELS := rust/core/src/transport/cuda/kernels
# The shell expands these, and not make, which would drop what is missing: a pattern that fits nothing stays, and fails.
CXX_FILES := csrc/*.hpp csrc/*.cpp include/*.h include/*.hpp include/*/*.hpp tests/c/*.[ch] tests/c/*.cpp \
	tests/cuda/torch_device/*.hpp tests/cuda/torch_device/*.cpp examples/c/*.[ch] examples/cpp/*.cpp benchmarks/ranks/*.c \
	benchmarks/ranks/*.h $(KERNELS)/*.cu $(KERNELS)/*.cuh $(KERNELS)/*.hpp $(KERNELS)/*.cpp
SHELL_FILES := .ci/run tools/*.sh tools/*/*.sh rust/capi/*.sh examples/slurm/*.sh
PYTHON_DIRS := python tools tests examples benchmarks $(KERNELS)

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z][a-z0-9-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) \
	  | while IFS=$$'\t' read -r name text; do printf '  make %-18s %s\n' "$$name" "$$text"; done

.PHONY: setup
setup: extension ## Make .venv with torch and the built package (instant the second time)

.PHONY: demo
demo: setup ## Train a digit classifier with 2 processes over unisono
	@OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node 2 \
	  examples/torch/train_digits.py

.PHONY: c
c: prerequisites ## Build libunisono, and put it where `python -m unisono --libs` finds it
	@CARGO_TARGET_DIR=$(TARGET) $(quietly) rust/capi/build.sh
	@rust/capi/install.sh --wheel "$(TARGET)/c" python/unisono/c

.PHONY: install
install: launcher ## Install libunisono, its headers, pkg-config and CMake files, and the launcher (PREFIX=/usr/local)
	@CARGO_TARGET_DIR=$(TARGET) $(quietly) rust/capi/build.sh
	rust/capi/install.sh "$(TARGET)/c" "$(DESTDIR)$(PREFIX)" "$(LIBDIR)"
	install -D -s -m 755 "$(TARGET)/release/unisono" "$(DESTDIR)$(PREFIX)/bin/unisono"

# The launcher as a program: the tests of it call that and Python's.
.PHONY: launcher
launcher: prerequisites
	@$(quietly) $(CARGO) build --release -p unisono-launch --target-dir $(TARGET)

.PHONY: check
check: lint c launcher ## Run what tells most in minutes: lint, the unit tests, some tests of each door
	$(CARGO) test --lib $(features) $(addprefix -p ,$(UNIT_TESTED)) --target-dir $(TARGET)
	$(pytest) $(beside) -m check

override make = $(MAKE) --no-print-directory
.PHONY: test
# Many of either kind wait, so they run beside each other.
test: setup c launcher test-tools ## Run the tests but for the slow ones: Rust's beside those in Python
	@tools/beside.sh $(make) test-rust -- $(make) test-python

.PHONY: test-slow test-slow-native
test-slow: test-slow-native test-aarch64-quick ## Run the slow ones: loom, frameworks, packages, tools, PyTorch's own (SHARD), aarch64

# Those that nothing is emulated for.
test-slow-native: frameworks c launcher nvrtc conda-tools test-loom
	@tools/system-packages.sh slow-tests
	$(pytest) -m quiet
	$(pytest) $(beside) -m "slow and not quiet"
	@$(make) conformance

.PHONY: test-rust
test-rust: prerequisites ## Run the Rust tests
	$(CARGO) test --no-fail-fast $(features) --target-dir $(TARGET) $(TEST)

.PHONY: test-loom
test-loom: prerequisites ## Run loom over what two threads share
	RUSTFLAGS="--cfg loom" $(CARGO) test -p unisono -p unisono-capi --lib --profile loom --target-dir $(TARGET)/loom loom_

.PHONY: test-tsan
test-tsan: prerequisites ## Run the tests of what threads share under ThreadSanitizer
	@tools/test-tsan.sh $(TARGET)

# Under an emulator, with compilers that are fetched where there are none. Each says why it skips where that cannot be.
override aarch64 = REQUIRED=$(REQUIRED) CARGO=$(CARGO) CARGO_TARGET_DIR=$(TARGET) PYTHON=$(PYTHON) tools/aarch64
.PHONY: test-aarch64 test-aarch64-quick
test-aarch64: prerequisites ## Run the tests of Rust, C and NumPy for aarch64, emulated: an hour or so
	@$(aarch64)/test.sh whole

test-aarch64-quick: prerequisites ## Run the part of them that takes a few minutes
	@$(aarch64)/test.sh quick

.PHONY: world
world: prerequisites ## Try the engine in simulated worlds that were not tried before, for SECONDS=20 (WORLD_SEED=7: one again)
	WORLD_SECONDS=$(SECONDS) $(CARGO) test -p unisono --lib --target-dir $(TARGET) -- --include-ignored --nocapture \
	  engine::world::tests::$(if $(WORLD_SEED),ten_thousand_worlds_hold,worlds_hold_for_long)

.PHONY: fuzz
fuzz: prerequisites ## Fuzz what is parsed from a peer or from the environment, each target for SECONDS=20
	@tools/fuzz.sh $(TARGET) $(SECONDS)

.PHONY: cuda-emulator
cuda-emulator: prerequisites ## Build the emulated CUDA driver for tests, and print its folder
	@tools/build-cuda-emulator.sh $(TARGET)

.PHONY: test-python
test-python: setup c launcher test-tools ## Run the Python and torch tests but for the slow ones (TEST names any)
	$(pytest) $(or $(TEST),$(beside) -m "not slow")

.PHONY: test-free-threaded
test-free-threaded: prerequisites ## Build for a Python without a GIL, and test NumPy's door on it (FREE_THREADED=python3.14t)
	$(if $(FREE_THREADED),,$(error name a Python without a GIL: make test-free-threaded FREE_THREADED=python3.14t))
	@tools/build-free-threaded.sh "$(FREE_THREADED)" $(TARGET)
	PYTHON_GIL=0 PYTHONPATH="$(CURDIR)/python" $(TARGET)/free-threaded/bin/python -m pytest -q -rs $(or $(TEST),tests/python/numpy)

.PHONY: test-c
test-c: setup c test-tools ## Run the tests of the C and C++ headers alone
	$(pytest) tests/python/c $(TEST)

# Without a build in this checkout it is the installed unisono that is tested, not the folder python/.
override with_setup := $(filter-out no,$(SETUP))
override installed = $(if $(with_setup)$(wildcard python/unisono/_core*.so),,-o pythonpath=tests/support)
.PHONY: test-cuda
test-cuda: $(if $(with_setup),setup) ## Run the tests that need a GPU, skipped where there is none (SETUP=no: with what is there)
	@gpus=$$(nvidia-smi -L 2>/dev/null) && echo "$$gpus" || echo "nvidia-smi finds no GPU here"
	$(if $(with_setup),$(PY),$(PYTHON)) -m pytest -q -rs $(installed) tests/cuda/with_gpu $(TEST)

# Two ranks; of each kind one. Tests that also run on the emulated driver are left to `make test-cuda`.
override quick_cuda := (test_torch_cuda and (same_bits or orders or captured or captures or goes_on or exchanges or in_place or dies or ddp or one_sided or window) \
	or test_arrays and (every_operation or given)) and not 1- and not 4- and not 8- and not 1] and not 4] and not 8]
.PHONY: test-cuda-quick
test-cuda-quick: ## Run those of them that tell most, with two ranks on one GPU: some minutes
	@$(make) test-cuda TEST='-W default -k "$(quick_cuda)" $(TEST)'

.PHONY: conformance
conformance: setup ## Run PyTorch's own tests of a backend (SHARD=1/4: a quarter of them)
	$(PY) tests/conformance/run.py --shard $(SHARD)

.PHONY: conformance-all
conformance-all: conformance frameworks ## The same, and programs of other packages: on gloo, and with unisono in its place
	$(PY) tests/conformance/behind_gloo.py

# The page to begin with; `unisono_8h` is what Doxygen calls unisono.h.
.PHONY: docs-c
docs-c: ## Build the reference of unisono.h into target/reference/ with Doxygen
	@tools/system-packages.sh docs
	@mkdir -p "$(TARGET)/reference"
	OUTPUT="$(TARGET)/reference" doxygen docs/Doxyfile
	@echo "the reference: $(TARGET)/reference/unisono_8h.html"

# Python's reference has the docstrings of the module that is built (SETUP=no: of the one that is there), and the C header's is
# taken where `make docs-c` has left it.
.PHONY: docs
docs: $(if $(with_setup),setup) $(DOCS_STAMP) ## Build the documentation into target/site/ (after docs-c with the C reference)
	SITE="$(TARGET)/site" C_REFERENCE="$(TARGET)/reference" NO_MKDOCS_2_WARNING=1 $(DOCS_TOOLS)/bin/mkdocs build --quiet --strict
	@echo "the site: $(TARGET)/site/index.html"

.PHONY: lint
lint: setup ## Check style, types and lints of every language
	$(CARGO) fmt --all --check
	$(PY) -m ruff check $(PYTHON_DIRS)
	$(PY) -m ruff format --check $(PYTHON_DIRS)
	MYPYPATH=python $(PY) -m mypy
	MYPYPATH=python $(PY) -m mypy.stubtest unisono._core
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/shellcheck $(SHELL_FILES)
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny --all-features check; \
	else echo "cargo deny: not installed, skipped (cargo install cargo-deny)"; fi
	$(CARGO) clippy --all-targets $(features) --target-dir $(TARGET) -- -D warnings
	$(with_torch) $(CARGO) clippy -p unisono-torch --target-dir $(TARGET) -- -D warnings

.PHONY: fmt
fmt: setup ## Format every language in place
	$(CARGO) fmt --all
	$(PY) -m ruff check --fix-only $(PYTHON_DIRS)
	$(PY) -m ruff format $(PYTHON_DIRS)
	$(VENV)/bin/clang-format -i $(CXX_FILES)

.PHONY: bench
bench: setup bench-peers ## Measure beside Open MPI, gloo and the memory, for ten minutes; results in bench-results/
	@mkdir -p $(BENCH_RESULTS)
	$(measure) benchmarks/compare.py --minutes 6 --json $(BENCH_RESULTS)/compare.json --csv $(BENCH_RESULTS)/compare.csv \
	  | tee $(BENCH_RESULTS)/compare.txt
	$(measure) benchmarks/ddp.py --json $(BENCH_RESULTS)/ddp.json | tee $(BENCH_RESULTS)/ddp.txt
	$(measure) benchmarks/failure.py --rounds 5 | tee $(BENCH_RESULTS)/failure.txt
	$(measure) benchmarks/sweep.py --quick | tee $(BENCH_RESULTS)/sweep.txt
	$(measure) benchmarks/instructions.py | tee $(BENCH_RESULTS)/instructions.txt
	@echo "results: $(BENCH_RESULTS)/ (compare, ddp, failure, sweep and instructions .txt; .csv, .json and .png beside them)"

.PHONY: results
results: setup bench-peers ## Measure the numbers of the documents anew, for 12 minutes as root on an idle machine
	$(measure) benchmarks/page.py --measure

# The script that brings the compilers for another machine than this one.
override cross = $(if $(filter-out $(shell uname -m),$(MACHINE)),CARGO_TARGET_DIR=$(TARGET) tools/$(MACHINE)/with-compilers.sh)
.PHONY: wheel
wheel: prerequisites $(WHEEL_STAMP) ## Build the wheel for every torch and glibc 2.28 into dist/ (TORCHES="2.15.0", MACHINE=aarch64)
	PYTHONPATH=tools $(cross) $(WHEEL_PY) -m unisono_build.release --machine $(MACHINE) $(addprefix --torch ,$(TORCHES)) --target $(TARGET)/wheel

.PHONY: sdist
sdist: prerequisites $(WHEEL_STAMP) ## Pack the source distribution into dist/
	PATH="$(WHEEL_TOOLS)/bin:$$PATH" $(WHEEL_PY) -m build --sdist --no-isolation --outdir dist

override test_package = $(PYTHON) tools/test_wheel.py $(addprefix --only ,$(WHEEL_ENVIRONMENTS)) \
	$(if $(filter yes,$(BUILD_TORCH)),--build-torch)
.PHONY: test-wheel
test-wheel: ## Test the wheel of dist/ in clean environments (WHEEL_ENVIRONMENTS="3.12:2.15.0 3.12:none")
	$(test_package) dist/unisono-*_$(MACHINE).whl

.PHONY: test-sdist
test-sdist: ## Test the source distribution of dist/ in two of them
	$(test_package) dist/unisono-*.tar.gz

# As the workflow publishes them; a lower version is there before, and in the end the release is yanked.
.PHONY: rehearse
rehearse: $(INDEX_STAMP) ## Publish what is in dist/ to an index on this machine, and install it from there by name
	$(INDEX_TOOLS)/bin/python tools/rehearse.py $(addprefix --only ,$(WHEEL_ENVIRONMENTS)) dist

.PHONY: conda
conda: $(CONDA_STAMP) ## Pack the wheel of dist/ for conda, into the channel dist/conda/ (MACHINE=aarch64)
	$(CONDA_TOOLS)/bin/python tools/build_conda.py dist/unisono-*_$(MACHINE).whl

# Other packages of that channel are stand-ins: docs/releasing.md says for what.
.PHONY: test-conda
test-conda: $(CONDA_STAMP) ## Install it from there into a fresh environment, and run ranks
	$(CONDA_TOOLS)/bin/python tools/test_conda.py dist/conda

.PHONY: audit
audit: prerequisites $(WHEEL_STAMP) ## Check licences and known vulnerabilities of all that is built with or depended on
	$(CARGO) deny --all-features check
	$(WHEEL_TOOLS)/bin/pip-audit --strict --progress-spinner off
	$(WHEEL_TOOLS)/bin/pip-audit --strict --progress-spinner off .

.PHONY: semver
semver: prerequisites ## Compare the public items of the crates with the last release's, or with BASELINE=REVISION
	@tools/semver.sh $(TARGET)/semver-tools $(BASELINE)

.PHONY: sbom
sbom: prerequisites ## Write which crates the wheel is made of into dist/ (cargo-cyclonedx)
	@tools/make-sbom.sh

.PHONY: ptx
ptx: nvrtc ## Compile the CUDA kernels anew, after a change of their sources (no GPU is needed)
	@[ -d "$(NVRTC)" ] || { echo "ptx: without NVRTC the kernels cannot be compiled" >&2; exit 1; }
	$(PY) $(KERNELS)/build.py "$(NVRTC)"

.PHONY: clean
clean: ## Remove what was built, and the virtual environments made here
	rm -rf target build dist site .venv .venv-torch* .pytest_cache .mypy_cache .ruff_cache
	rm -rf python/unisono/*.so python/unisono/c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# These need nothing but cargo and a C compiler.
override NEEDED := $(if $(filter-out c install launcher cuda-emulator semver,$(MAKECMDGOALS)),build $(VENV),c)
.PHONY: prerequisites
prerequisites:
	@tools/system-packages.sh $(NEEDED)

# Packages for the tests of the C header (besides gcc), of `unisono launch --hosts` and of a router between hosts.
.PHONY: test-tools
test-tools:
	@tools/system-packages.sh tests

$(PY): | prerequisites
	tools/make-venv.sh $(VENV)

$(PACKAGE_STAMP): pyproject.toml Cargo.toml $(RUST_PACKAGES) | $(PY)
	@tools/install-development.sh $(VENV) $(TORCH) $(TARGET)
	@touch $@

.PHONY: extension
extension: prerequisites $(PACKAGE_STAMP)
	@tools/build-extension.sh $(VENV) $(TARGET)

# The tools that build a wheel, in an environment without torch.
$(WHEEL_STAMP): pyproject.toml | prerequisites
	tools/make-venv.sh $(WHEEL_TOOLS) --group release
	@touch $@

# An index of packages on this machine, and what uploads to it.
$(INDEX_STAMP): pyproject.toml | prerequisites
	tools/make-venv.sh $(INDEX_TOOLS) --group rehearsal
	@touch $@

# The tools that build, solve and install packages for conda.
$(CONDA_STAMP): pyproject.toml | prerequisites
	tools/make-venv.sh $(CONDA_TOOLS) --group conda
	@touch $@

# The tools that build the site, in another one.
$(DOCS_STAMP): pyproject.toml | prerequisites
	tools/make-venv.sh $(DOCS_TOOLS) --group docs
	@touch $@

.PHONY: bench-peers
bench-peers: setup
	@tools/install-extra.sh $(VENV) bench "what unisono is measured beside" \
	  "Open MPI and matplotlib could not be installed: they are left out"

.PHONY: nvrtc
nvrtc: | $(PY)
	@tools/install-nvrtc.sh $(VENV) $(NVRTC)

.PHONY: conda-tools
conda-tools:
	@$(make) $(CONDA_STAMP) || echo "the tools for conda could not be installed: the test of its package will be skipped"

.PHONY: frameworks
frameworks: setup
	@[ "$(FRAMEWORKS)" != yes ] || tools/install-extra.sh $(VENV) frameworks \
	  "the frameworks above torch (FRAMEWORKS=no: leave them out)" \
	  "the frameworks could not be installed: their tests will be skipped"

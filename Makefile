# Everything one does with this checkout. `make help` lists the targets; the text after `##` is what it shows.
#
# Two variables choose the environment:
#   TORCH=2.11.0     the torch to build and test against, in a virtual environment of its own
#   VENV=/some/venv  an environment you already have; a torch that is in it stays
# SETUP=no makes `make test-cuda` take what is there, PYTHON and the unisono it finds, and build and download nothing.

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
# Extra arguments: `make test-python TEST="tests/python/test_ranks.py -k dies"`, `make test-rust TEST=plan::`.
TEST ?=
# How long `make fuzz` runs each of its targets.
SECONDS ?= 20
# The part of PyTorch's tests that `make conformance` runs.
SHARD ?= 1/1
# Where `make install` puts the C library: PREFIX/include, PREFIX/LIBDIR; before both DESTDIR, for packagers.
PREFIX ?= /usr/local
LIBDIR ?= lib
DESTDIR ?=
# Whether the tests install the frameworks above torch (Accelerate, Lightning, DeepSpeed, Ray): 170 MB to download.
FRAMEWORKS ?= yes
SETUP ?= yes

override VENV := $(abspath $(VENV))
override TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
override PY := $(VENV)/bin/python
# An environment may serve several checkouts, so the stamps carry the checkout they speak for.
override CHECKOUT := $(shell printf %s "$(CURDIR)" | cksum | cut -d' ' -f1)
override PACKAGE_STAMP := $(VENV)/.unisono-$(CHECKOUT)

# Where this environment's torch lies and its minor version ("2.15"), without the seconds an import takes.
override find_torch = \
	torch_dir=$$($(PY) -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])'); \
	torch_minor=$$(sed -n "s/^__version__ = '\([0-9]*\.[0-9]*\).*/\1/p" "$$torch_dir/version.py")
override with_torch = $(find_torch); export UNISONO_TORCH_DIR="$$torch_dir" PYO3_PYTHON=$(PY)
override torch_target = --target-dir "$(TARGET)/torch-$$torch_minor"

# maturin announces itself at every call; cargo's own lines are enough.
override maturin_develop = VIRTUAL_ENV=$(VENV) $(VENV)/bin/maturin develop --release --target-dir $(TARGET)
override hush = 2>&1 | { grep -Ev '^(🍹|🐍|🔗|📦|🛠|✏️|📡|    Finished)' || true; }

# Replace a library only when it differs, and never in place: a running process may have it mapped.
override publish = publish() { cmp -s "$$1" "$$2" || { cp "$$1" "$$2.new" && mv "$$2.new" "$$2"; }; }; publish

RUST_PACKAGES := $(wildcard rust/*/Cargo.toml)
KERNELS := rust/core/src/transport/cuda/kernels
CXX_FILES = $(wildcard csrc/*.hpp csrc/*.cpp include/*.h include/*.hpp tests/c/*.[ch] tests/c/*.cpp \
	tests/torch_cuda/*.hpp tests/torch_cuda/*.cpp examples/c/*.[ch] examples/cpp/*.cpp benchmarks/ranks/*.c \
	benchmarks/ranks/*.h $(KERNELS)/*.cu $(KERNELS)/*.cuh $(KERNELS)/*.hpp $(KERNELS)/*.cpp)
PYTHON_DIRS = $(wildcard python tests/python tests/conformance tests/cuda examples benchmarks $(KERNELS))

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
	@CARGO=$(CARGO) CARGO_TARGET_DIR=$(TARGET) rust/capi/build.sh $(hush)
	@rust/capi/install.sh --no-links "$(TARGET)/c" python/unisono/c

.PHONY: install
install: prerequisites ## Install libunisono, its headers, pkg-config and CMake files, and the launcher (PREFIX=/usr/local)
	@CARGO=$(CARGO) CARGO_TARGET_DIR=$(TARGET) rust/capi/build.sh $(hush)
	@$(CARGO) build --release -p unisono-launch --target-dir $(TARGET) $(hush)
	rust/capi/install.sh "$(TARGET)/c" "$(DESTDIR)$(PREFIX)" "$(LIBDIR)"
	install -D -s -m 755 "$(TARGET)/release/unisono" "$(DESTDIR)$(PREFIX)/bin/unisono"

.PHONY: test
test: test-rust test-python ## Run every test

.PHONY: test-rust
test-rust: prerequisites ## Run the Rust tests, and loom over what two threads share
	$(CARGO) test --workspace --exclude unisono-python --target-dir $(TARGET) $(TEST)
	RUSTFLAGS="--cfg loom" $(CARGO) test -p unisono -p unisono-capi --lib --release --target-dir $(TARGET)/loom loom_

# Tests in which threads of one process share memory at the same addresses; what ranks map twice it cannot follow. The
# standard library is built anew, because all code must be instrumented. Threads that the process ends with are no leak.
TSAN_TESTS := engine:: heap:: reduce::workers transport::
override tsan := RUSTFLAGS="-Zsanitizer=thread" TSAN_OPTIONS="halt_on_error=1 report_thread_leaks=0" $(CARGO) +nightly test -Zbuild-std \
  --target x86_64-unknown-linux-gnu --target-dir $(TARGET)/tsan -p unisono
.PHONY: test-tsan
test-tsan: prerequisites ## Run the tests of what threads share under ThreadSanitizer
	@if ! sysroot=$$(rustc +nightly --print sysroot 2>/dev/null); then \
	  echo "test-tsan: there is no nightly toolchain, skipped (rustup toolchain install nightly)"; exit 0; fi; \
	if [ ! -d "$$sysroot/lib/rustlib/src" ]; then \
	  echo "test-tsan: rust-src is not installed, skipped (rustup component add rust-src --toolchain nightly)"; exit 0; fi; \
	set -x; $(tsan) --lib -- $(TSAN_TESTS)

# Under an emulator, with compilers that are fetched where there are none. Each says why it skips where that cannot be.
override aarch64 = CARGO=$(CARGO) CARGO_TARGET_DIR=$(TARGET) PYTHON=$(PYTHON) tools/aarch64
.PHONY: test-aarch64 test-aarch64-quick
test-aarch64: prerequisites ## Run the tests of Rust, C and NumPy for aarch64, emulated: an hour or so
	@$(aarch64)/test.sh whole

test-aarch64-quick: prerequisites ## Run the part of them that takes a few minutes
	@$(aarch64)/test.sh quick

# What a target finds goes to fuzz/artifacts, and what it learns to the build folder: fuzz/corpus has the seeds alone.
FUZZ_TARGETS := $(notdir $(basename $(wildcard fuzz/fuzz_targets/*.rs)))
override fuzz := $(CARGO) +nightly fuzz
.PHONY: fuzz
fuzz: prerequisites ## Fuzz what is parsed from a peer or from the environment, each target for SECONDS=20
	@if ! $(CARGO) +nightly --version >/dev/null 2>&1; then \
	  echo "fuzz: there is no nightly toolchain, skipped (rustup toolchain install nightly)"; exit 0; fi; \
	if ! $(fuzz) --version >/dev/null 2>&1; then \
	  echo "fuzz: cargo-fuzz is not installed, skipped (cargo install cargo-fuzz)"; exit 0; fi; \
	unset CARGO_TARGET_DIR; \
	$(fuzz) build --target-dir $(TARGET)/fuzz; \
	for target in $(FUZZ_TARGETS); do \
	  learned=$(TARGET)/fuzz/corpus/$$target; \
	  mkdir -p $$learned; \
	  echo "fuzz: $$target, $(SECONDS) s"; \
	  ASAN_OPTIONS=detect_leaks=0 $(fuzz) run --target-dir $(TARGET)/fuzz $$target $$learned fuzz/corpus/$$target -- \
	    -max_total_time=$(SECONDS) -max_len=4096 -rss_limit_mb=2048 -timeout=20 -verbosity=0 -print_final_stats=1; \
	done

# A folder with libcuda.so and libcuda.so.1, which tests put into LD_LIBRARY_PATH.
override CUDA_EMULATOR := $(TARGET)/cuda-emulator
.PHONY: cuda-emulator
cuda-emulator: prerequisites ## Build the emulated CUDA driver for tests, and print its folder
	@$(CARGO) build --release -p unisono-cuda-emulator --target-dir $(TARGET) $(hush)
	@mkdir -p $(CUDA_EMULATOR)
	@$(publish) $(TARGET)/release/libunisono_cuda_emulator.so $(CUDA_EMULATOR)/libcuda.so.1
	@ln -sf libcuda.so.1 $(CUDA_EMULATOR)/libcuda.so
	@echo $(CUDA_EMULATOR)

.PHONY: test-python
test-python: frameworks c c-tools nvrtc ## Run the Python and torch tests
	$(PY) -m pytest -q -rs $(TEST)

.PHONY: test-c
test-c: setup c c-tools ## Run the tests of the C and C++ headers alone
	$(PY) -m pytest -q -rs tests/python/test_c.py tests/python/test_c_install.py \
	  tests/python/test_c_examples.py $(TEST)

# Without a build in this checkout it is the installed unisono that is tested, not the folder python/.
override with_setup := $(filter-out no,$(SETUP))
override installed = $(if $(with_setup)$(wildcard python/unisono/_core*.so),,-o pythonpath=tests/python)
.PHONY: test-cuda
test-cuda: $(if $(with_setup),setup) ## Run the tests that need a GPU, skipped where there is none (SETUP=no: with what is there)
	@gpus=$$(nvidia-smi -L 2>/dev/null) && echo "$$gpus" || echo "nvidia-smi finds no GPU here"
	$(if $(with_setup),$(PY),$(PYTHON)) -m pytest -q -rs $(installed) tests/cuda $(TEST)

.PHONY: conformance
conformance: setup ## Run PyTorch's own tests of a backend (SHARD=1/4: a quarter of them)
	$(PY) tests/conformance/run.py --shard $(SHARD)

.PHONY: lint
lint: setup ## Check style, types and lints of every language
	$(CARGO) fmt --all --check
	PYO3_PYTHON=$(PY) $(CARGO) clippy --workspace --all-targets --target-dir $(TARGET) -- -D warnings
	@if [ -f csrc/backend.cpp ]; then echo "$(CARGO) clippy -p unisono-python --features torch"; $(with_torch); \
	  $(CARGO) clippy --release -p unisono-python --features torch $(torch_target) -- -D warnings; fi
	@if command -v cargo-deny >/dev/null; then $(CARGO) deny --all-features check; \
	else echo "cargo deny: not installed, skipped (cargo install cargo-deny)"; fi
	$(PY) -m ruff check $(PYTHON_DIRS)
	$(PY) -m ruff format --check $(PYTHON_DIRS)
	@if [ -f python/unisono/_core.pyi ]; then set -x; export MYPYPATH=python; \
	  $(PY) -m mypy; $(PY) -m mypy.stubtest unisono._core; \
	else echo "mypy: python/unisono/_core.pyi does not exist, skipped"; fi
	@if [ -n "$(CXX_FILES)" ]; then set -x; $(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES); \
	else echo "clang-format: no C or C++ file, skipped"; fi

.PHONY: fmt
fmt: setup ## Format every language in place
	$(CARGO) fmt --all
	$(PY) -m ruff check --fix-only $(PYTHON_DIRS)
	$(PY) -m ruff format $(PYTHON_DIRS)
	@if [ -n "$(CXX_FILES)" ]; then $(VENV)/bin/clang-format -i $(CXX_FILES); fi

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

.PHONY: wheel
wheel: setup c ## Build a wheel for this environment's torch, with the C library, into dist/
	@for library in python/unisono/core-torch-*.so; do [ ! -f "$$library" ] || \
	  { strip --strip-debug -o "$$library.new" "$$library" && mv "$$library.new" "$$library"; }; done
	$(VENV)/bin/maturin build --release --out dist --interpreter $(PY) --target-dir $(TARGET)

.PHONY: ptx
ptx: nvrtc ## Compile the CUDA kernels anew, after a change of their sources (no GPU is needed)
	@[ -d "$(NVRTC)" ] || { echo "ptx: without NVRTC the kernels cannot be compiled" >&2; exit 1; }
	$(PY) $(KERNELS)/build.py "$(NVRTC)"

.PHONY: clean
clean: ## Remove what was built, and the virtual environments made here
	rm -rf target build dist site .venv .venv-torch* .pytest_cache .mypy_cache .ruff_cache
	rm -rf python/unisono/*.so python/unisono/c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What pip and cargo cannot bring. As root on Debian the missing packages are installed; otherwise they are named.
# The C library and the launcher need nothing but cargo and a C compiler.
override ALL := $(filter-out c install cuda-emulator,$(MAKECMDGOALS))
.PHONY: prerequisites
prerequisites:
	@command -v $(CARGO) >/dev/null || { echo "cargo is not installed. Install stable Rust (https://rust-lang.org/tools/install), then run make again." >&2; exit 1; }
	@missing=(); \
	command -v cc >/dev/null || missing+=(gcc); \
	if [ -n "$(ALL)" ]; then \
	command -v c++ >/dev/null || missing+=(g++); \
	command -v $(PYTHON) >/dev/null || missing+=(python3 python3-venv); \
	: "the tests across hosts skip without ip"; \
	! command -v apt-get >/dev/null || [ "$$(id -u)" -ne 0 ] || command -v ip >/dev/null || missing+=(iproute2); \
	if [ ! -x $(PY) ] && command -v $(PYTHON) >/dev/null; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$$($(PYTHON) --version) is too old: unisono needs 3.10 or newer (make PYTHON=python3.12)" >&2; exit 1; }; \
	  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv); \
	fi; \
	fi; \
	[ $${#missing[@]} -eq 0 ] && exit 0; \
	if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $${missing[*]}"; apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$${missing[@]}" </dev/null; \
	else echo "missing: $${missing[*]}. On Debian: sudo apt-get install $${missing[*]}" >&2; exit 1; fi

# What the tests of the C header use besides gcc. Without it some of them skip, so it may fail.
.PHONY: c-tools
c-tools:
	@if command -v apt-get >/dev/null && [ "$$(id -u)" -eq 0 ]; then \
	  missing=(); \
	  for tool in clang valgrind pkg-config; do command -v $$tool >/dev/null || missing+=($$tool); done; \
	  [ $${#missing[@]} -eq 0 ] && exit 0; \
	  echo "installing $${missing[*]}"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qq -y --no-install-recommends "$${missing[@]}" </dev/null; } || \
	    echo "$${missing[*]} could not be installed: some tests of the C header will be skipped"; \
	fi

$(PY): | prerequisites
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --upgrade pip

# The editable install: the console scripts, the entry points torch finds us by, and what development needs.
# Only a change of metadata brings it back; sources are cargo's business, below.
$(PACKAGE_STAMP): pyproject.toml Cargo.toml $(RUST_PACKAGES) | $(PY)
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
	  { echo "installing torch $(TORCH) (a large download)"; \
	    $(PY) -m pip install torch==$(TORCH); }
	@echo "installing the package and its development tools into $(VENV)"
	@$(PY) -m pip install 'maturin>=1.9,<2'
	@$(maturin_develop) --extras examples,test,lint $(hush)
	@touch $@

# Two builds of one crate: without torch for the Python door, and one for this environment's torch. cargo decides
# whether there is anything to do.
.PHONY: extension
extension: prerequisites $(PACKAGE_STAMP)
	@$(maturin_develop) --skip-install $(hush)
	@if [ -f csrc/backend.cpp ]; then $(with_torch); \
	  $(CARGO) build --release -p unisono-python --features torch $(torch_target) $(hush); \
	  $(publish) "$(TARGET)/torch-$$torch_minor/release/lib_core.so" "python/unisono/core-torch-$$torch_minor.so"; \
	else echo "torch: csrc/backend.cpp does not exist, built without it"; fi

override BENCH_RESULTS := bench-results
override measure = CARGO_TARGET_DIR=$(TARGET) $(PY) -u

# Open MPI and matplotlib. Without them the benchmarks leave that peer and the plots out, so it may fail.
override BENCH_STAMP := $(VENV)/.unisono-bench
.PHONY: bench-peers
bench-peers: setup
	@if [ ! -f $(BENCH_STAMP) ]; then \
	  echo "installing what unisono is measured beside"; \
	  requirements=$$($(PY) -c 'import importlib.metadata as m; print(*(r.split(";")[0].strip() for r in m.requires("unisono") if "bench" in r))'); \
	  if $(PY) -m pip install $$requirements; then touch $(BENCH_STAMP); \
	  else echo "Open MPI and matplotlib could not be installed: they are left out"; fi; \
	fi

# The compiler of the CUDA kernels, in a folder of its own: torch has another. Without it a test skips, so it may fail.
override NVRTC := $(TARGET)/nvrtc
.PHONY: nvrtc
nvrtc: | $(PY)
	@requirement=$$($(PY) $(KERNELS)/build.py --requirement); \
	if [ ! -f "$(NVRTC)/$$requirement" ]; then \
	  echo "installing $$requirement into $(NVRTC)"; \
	  rm -rf "$(NVRTC)"; \
	  if $(PY) -m pip install --no-deps --target "$(NVRTC)" "$$requirement"; then touch "$(NVRTC)/$$requirement"; \
	  else echo "NVRTC could not be installed: that the PTX is the sources' will not be tested in full"; fi; \
	fi

# What the tests of the frameworks need. Without it they skip, so it may fail; torch stays as it is.
override FRAMEWORKS_STAMP := $(VENV)/.unisono-frameworks
.PHONY: frameworks
frameworks: setup
	@if [ "$(FRAMEWORKS)" = yes ] && [ ! -f $(FRAMEWORKS_STAMP) ]; then \
	  echo "installing the frameworks above torch (FRAMEWORKS=no: leave them out)"; \
	  $(PY) -m pip freeze | grep '^torch==' > $(FRAMEWORKS_STAMP).constraints; \
	  requirements=$$($(PY) -c 'import importlib.metadata as m; print(*(r.split(";")[0].strip() for r in m.requires("unisono") if "frameworks" in r))'); \
	  if DS_BUILD_OPS=0 $(PY) -m pip install -c $(FRAMEWORKS_STAMP).constraints $$requirements; \
	  then touch $(FRAMEWORKS_STAMP); \
	  else echo "the frameworks could not be installed: their tests will be skipped"; fi; \
	fi

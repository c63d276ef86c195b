# Two words matter: demo and test. Each does all its own set-up.
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
# What the commands count their time from: also what is installed before they run.
export KVLINE_BEGAN := $(shell date +%s)
# Where it is set, each process compiles all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-down images test test-gpu demo-gpu demo-gpu-down demo-gpu-rehearsal gpu-node image-check kernels cubins check unit kernels-test process clients integration e2e recipes env bench scale soak-rollout plot api manifests lock clean

help: ## these words
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: python ## a model served with a validated KV budget, on this machine
	@$(PYTHON) demo

demo-down: python ## remove what the demo made
	@$(PYTHON) demo down

demo-gpu: python ## the story on an NVIDIA GPU: from apply to gated rollouts; STEPS= selects, PARTS=build/gpu-node
	@$(PYTHON) demo/gpu.py

gpu-node: env ## build/gpu-node: what a GPU machine without a network lacks, in two parts; KERNELS=FILE
	@$(VENV_PYTHON) tests/gpu_node/pack.py

demo-gpu-down: python ## remove what demo-gpu made
	@$(PYTHON) demo/gpu.py down

demo-gpu-rehearsal: env ## its steps that need no GPU, as a test on the local node
	@$(VENV_PYTHON) tests/suite rehearsal

images: python ## build and push the images: REGISTRY=host/path; KERNELS=FILE: CUDA's too
	@$(PYTHON) demo/publish.py

test: env ## everything that this machine can run, and what it could not
	@$(VENV_PYTHON) tests/suite

env: python ## .venv, with what the other words need
	@$(PYTHON) tests/environment.py

check: env ## a part of test: formatter, linters, types, house rules
	@$(VENV_PYTHON) tests/suite check

unit: env ## a part of test: what needs neither cluster nor GPU
	@$(VENV_PYTHON) tests/suite unit

kernels-test: env ## a part of test: GPU kernels without a GPU
	@$(VENV_PYTHON) tests/suite kernels

process: env ## a part of test: whole servers
	@$(VENV_PYTHON) tests/suite process

clients: env ## clients that few programs use, in environments of their own (docs/clients.md)
	@$(VENV_PYTHON) tests/suite clients

integration: env ## a part of test: with a real API server; root
	@$(VENV_PYTHON) tests/suite integration

e2e: env ## a part of test: with real pods; root
	@$(VENV_PYTHON) tests/suite e2e

recipes: env ## the HPA recipe with Prometheus and its adapter, on the local node
	@$(VENV_PYTHON) tests/suite recipes

test-gpu: ## what needs a CUDA GPU; KIT= names wheels and kernels for a bare machine
	@tests/gpu/run.sh

image-check: env ## the images: no compiler, no setuid file, no root, imports, size; KERNELS=FILE: CUDA's
	@KERNELS=$(KERNELS) $(VENV_PYTHON) tests/cluster/check_images.py

kernels: ## dist/kernels.tar.xz, FlashInfer's for compute capability 9.x; needs nvcc and its packages
	@mkdir -p dist && PYTHONPATH=server $(PYTHON) -m kvline_server.kernels.library dist/kernels.tar.xz

cubins: env ## dist/cubins.bin, our own GPU kernels; needs no GPU
	@mkdir -p dist && $(VENV_PYTHON) -m kvline_server.kernels.build dist/cubins.bin

bench: env ## the figures of docs/performance.md
	@$(VENV_PYTHON) bench

soak-rollout: env ## 50 gated rollouts under streaming traffic on a real node
	@$(VENV_PYTHON) bench rollouts

scale: env ## the operator with 100 and 1,000 services, on kwok's nodes with fake engines
	@$(VENV_PYTHON) bench scale

plot: env ## docs/images from bench/results
	@$(VENV_PYTHON) bench plot

api: env ## docs/api.md from the CRD
	@$(VENV_PYTHON) docs/generate_api.py

manifests: env ## manifests/install.yaml from the chart, and copies in the charts
	@$(VENV_PYTHON) tests/cluster/helm.py

lock: ## requirements/*.txt, with hashes, from pyproject.toml; then today's newest is installed and run
	@$(PYTHON) requirements/lock.py
	@$(PYTHON) tests/environment.py
	@KVLINE_INSTALL_TODAY=1 $(VENV_PYTHON) -m pytest -q tests/server/test_install.py

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: python
python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; PYTHON=... names one"; exit 1; }

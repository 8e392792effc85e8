#!/usr/bin/env bash
# make test-engines: the portable targets, the artifact, and what `check` says, in real engines on a CPU;
# make test-vllm: the artifact alone. The first run installs .venv-vllm, .venv-vllm-plugin and .venv-hf (about
# 6 GB); a run of all takes about an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash tests/engines/install.sh vllm
bash tests/engines/install.sh plugin
bash tests/engines/install.sh hf
exec .venv-hf/bin/python tests/engines/drive.py "$@"

#!/usr/bin/env bash
# make test-engines: the portable targets, and what `check` says, in real engines on a CPU.
# The first run installs two environments (.venv-vllm and .venv-hf, about 6 GB); a run takes about half an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash tests/engines/install.sh vllm
bash tests/engines/install.sh hf
exec .venv-hf/bin/python tests/engines/drive.py "$@"

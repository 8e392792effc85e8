#!/usr/bin/env bash
# make test-engines: the portable targets, the artifact, and what `check` says, in real engines on a CPU;
# make test-vllm: the artifact alone, in the newest and the oldest release of vLLM that the plugin supports. The
# first run installs .venv-vllm, .venv-vllm-plugin, .venv-vllm-older and .venv-hf (about 6 GB); a run of all takes
# more than an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash tests/engines/install.sh hf
read -r oldest newest <<< "$(.venv-hf/bin/python -c 'from w4pack.convert.engines.plugin import TESTED; print(TESTED[0], TESTED[-1])')"
bash tests/engines/install.sh vllm "$newest"
bash tests/engines/install.sh plugin
bash tests/engines/install.sh older "$oldest"
exec .venv-hf/bin/python tests/engines/drive.py "$@"

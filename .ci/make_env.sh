#!/usr/bin/env bash
# Make or refresh a virtual environment. Called by the Makefile, which decides when.
#
#   make_env.sh base    DIR            the checkout alone, as a user of the converter installs it: no torch
#   make_env.sh test    DIR            the checkout, its dev extra and a CPU build of torch
#   make_env.sh overlay DIR BASE REQ.. other versions (REQ) of some packages in front of those of BASE
#
# PYTHON names the interpreter. W4PACK_TORCH, if set, is what pip gets for torch: a version, the path of a
# wheel, or words with an index option (W4PACK_TORCH="torch==2.13.0 --index-url URL").
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
python=${PYTHON:-python3}
torch_default="torch==2.13.0" # the version the suite is developed with; any release from 2.6 on works

say() { printf 'env: %s\n' "$*" >&2; }

# 0 if the interpreter $1 can import a torch without CUDA, 1 if there is none, 2 if it is a CUDA build.
torch_kind() {
    "$1" - <<'PY'
import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    sys.exit(1)
import torch
sys.exit(0 if torch.version.cuda is None and getattr(torch.version, "hip", None) is None else 2)
PY
}

new_venv() { # DIR [options of venv]; an existing one is kept, so a second run works without a network
    [ -x "$1/bin/python" ] || "$python" -m venv "${@:2}" "$1"
}

# What would pip take for torch? Its metadata is enough to tell: on Linux a CUDA build requires NVIDIA's wheels.
default_torch_is_cpu() {
    local report
    report=$("$1" -m pip install --quiet --dry-run --no-deps --ignore-installed --report - "$torch_default") || return 1
    printf '%s' "$report" | "$1" -c '
import json, sys
wants = json.load(sys.stdin)["install"][0]["metadata"].get("requires_dist", [])
sys.exit(sys.platform == "linux" and any(w.startswith(("nvidia-", "cuda-")) for w in wants))'
}

install_torch() { # PYTHON OF THE VENV
    local kind=0
    torch_kind "$1" || kind=$?
    if [ "$kind" = 1 ]; then
        if [ -n "${W4PACK_TORCH:-}" ]; then
            say "torch: $W4PACK_TORCH (from W4PACK_TORCH)"
            # shellcheck disable=SC2086  # words on purpose: it may hold options
            "$1" -m pip install --quiet $W4PACK_TORCH
        elif default_torch_is_cpu "$1"; then
            say "torch: $torch_default, which is a CPU build here"
            "$1" -m pip install --quiet "$torch_default"
        else
            # The default wheel of this platform carries CUDA. uv knows where the CPU builds lie.
            say "torch: $torch_default, the CPU build by way of uv (pip's default here is a CUDA build)"
            "$1" -m pip install --quiet uv
            "$1" -m uv pip install --quiet --python "$1" --torch-backend cpu "$torch_default" || true # said below
        fi
        kind=0
        torch_kind "$1" || kind=$?
    fi
    if [ "$kind" != 0 ]; then
        say "error: no CPU build of torch in $(dirname "$(dirname "$1")")"
        say "hint: name one, for example W4PACK_TORCH=/path/to/torch-cpu.whl make test"
        exit 1
    fi
}

# The checkout is built without isolation: after the first time it installs again without a network.
have_setuptools() { # PYTHON OF THE VENV
    "$1" -c 'import setuptools as s; exit(int(s.__version__.split(".")[0]) < 77)' 2>/dev/null ||
        "$1" -m pip install --quiet --upgrade 'setuptools>=77'
}

case "$1" in
    base)
        new_venv "$2"
        have_setuptools "$2/bin/python"
        "$2/bin/python" -m pip install --quiet --no-build-isolation "$root"
        ;;
    test)
        # A CPU torch that the interpreter already has is used in place: it is most of the download.
        kind=0
        torch_kind "$python" || kind=$?
        if [ "$kind" = 0 ]; then
            say "torch: the one of $python"
            new_venv "$2" --system-site-packages
        else
            new_venv "$2"
        fi
        install_torch "$2/bin/python"
        have_setuptools "$2/bin/python"
        "$2/bin/python" -m pip install --quiet --no-build-isolation --editable "$root[dev]"
        install_torch "$2/bin/python" # once more: nothing that came later may have replaced it
        ;;
    overlay)
        # REQ is installed into DIR; everything else is seen through a .pth file, later on the path.
        # So two more pairs of transformers and huggingface_hub cost megabytes, not another torch.
        dir=$2 base=$3
        shift 3
        options=()
        grep -q 'include-system-site-packages = true' "$base/pyvenv.cfg" && options=(--system-site-packages)
        new_venv "$dir" "${options[@]}"
        site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
        # site.addsitedir also reads BASE's own .pth files: the editable install of the checkout is one.
        printf 'import site; site.addsitedir(%s)\n' "'$(cd "$(site "$base")" && pwd)'" > "$(site "$dir")/zz_base.pth"
        # Without a network: what is there, if it satisfies REQ.
        "$dir/bin/python" -m pip install --quiet --upgrade "$@" || "$dir/bin/python" -m pip install --quiet "$@"
        ;;
    *)
        say "error: unknown kind of environment: $1"
        exit 2
        ;;
esac

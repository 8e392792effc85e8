#!/bin/sh
# Everything that needs a card, in one command: the tests, the sanitizer where there is one, the benchmark.
#
#   sh tests/gpu/run_all.sh [tests] [sanitizer] [bench]      (all three where none is named)
#
# Needs built cubins (make kernels) and, for the golden tests, the fixtures folder (W4PACK_SHARED).
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
root=$(mktemp -d)
ln -s "$PWD" "$root/w4pack"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
[ $# -gt 0 ] || set -- tests sanitizer bench
for part in "$@"; do
    case $part in
    tests) "$PYTHON" -m pytest -q -p no:cacheprovider -W default -m gpu tests/gpu tests/plugin/test_lazy.py --durations=5 ;;
    sanitizer)
        if command -v compute-sanitizer >/dev/null; then
            for part in $("$PYTHON" tests/gpu/sanitize.py --parts); do  # synccheck has room for one part's barriers
                for tool in memcheck "synccheck --num-cuda-barriers 65536"; do
                    # shellcheck disable=SC2086  # a tool and its options
                    compute-sanitizer --report-api-errors no --tool $tool --error-exitcode 1 \
                        "$PYTHON" tests/gpu/sanitize.py "$part"
                done
            done
            # Reports of kernels with barriers for parts of a block are not errors: docs/gpu.md says why.
            compute-sanitizer --report-api-errors no --tool racecheck "$PYTHON" tests/gpu/sanitize.py
        else
            echo "no compute-sanitizer here"
        fi ;;
    bench)
        "$PYTHON" benchmarks/gemm.py
        "$PYTHON" benchmarks/gemm.py --variants
        "$PYTHON" benchmarks/int_gemm.py
        "$PYTHON" benchmarks/int_gemm.py --step
        "$PYTHON" benchmarks/moe.py --dense
        "$PYTHON" benchmarks/small_m.py
        "$PYTHON" benchmarks/kv.py
        "$PYTHON" benchmarks/decode.py
        "$PYTHON" benchmarks/block.py
        "$PYTHON" benchmarks/start.py ;;
    esac
done

#!/bin/sh
# What `make demo` runs: one checkpoint from its first inspection to the artifact and back.
#
#   demo.sh W4PACK SRC OUT     OUT is a scratch folder of this script; it starts empty at each run
set -eu
w4pack=$1 src=$2 out=$3
rm -rf "$out"
mkdir -p "$out"

step() { # TITLE EXIT_CODE ARGS..: say the command, run it, insist on its exit code
    title=$1 wanted=$2
    shift 2
    printf '\n== %s\n$ w4pack %s\n' "$title" "$*"
    code=0
    "$w4pack" "$@" || code=$?
    if [ "$code" -ne "$wanted" ]; then
        printf 'demo: exit code %s, expected %s\n' "$code" "$wanted" >&2
        exit 1
    fi
}

step "What is it? (headers only)" 0 inspect "$src"
step "Will vLLM take it? No: act-order (exit code 3 is the answer no)" 3 check "$src" --engine vllm
step "Pack it for tensor cores, bit for bit" 0 convert "$src" "$out/artifact" --to marlin
step "Prove it: every code, zero, scale and group against the source" 0 verify "$out/artifact" --against "$src"
step "Turn it back" 0 unpack "$out/artifact" "$out/back"
step "Prove that too" 0 verify "$out/back" --against "$src"
step "A checkpoint for the stock engine: act-order folded, the rest re-quantized with its error measured" 0 \
    convert "$src" "$out/gptq" --to gptq --regroup
step "Will vLLM take that one?" 0 check "$out/gptq" --engine vllm

printf '\n== Done\n'
printf '%s\n' \
    "source    $src: GPTQ 4 bit with act-order, written by GPTQModel" \
    "artifact  $out/artifact: the same codes, zeros, scales and order, packed once and for all" \
    "back      $out/back: unpacked, equal to the source" \
    "gptq      $out/gptq: portable; loads where the source was refused"

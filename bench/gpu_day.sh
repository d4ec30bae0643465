#!/usr/bin/env bash
# Everything that only a machine with a GPU can show, stage by stage: bash bench/gpu_day.sh STAGE...
#
#     probe         what the GPU, its driver and its bus can do by themselves          2 minutes
#     tests         tests/gpu                                                          3
#     bench         lmtier bench --gpu                                                 3
#     sanitize      memcheck and initcheck over the kernels' tests                     5
#     toy           an engine of our own with CUDA graphs: answers, and what it costs  4
#     transformers  PrefixCache: time to first token                                   3
#     vllm          times to first token and answers, beside a plain engine           10
#
# bash bench/gpu_day.sh --simulated probe tests bench toy rehearses those stages on any machine, on the simulated
# device; so do transformers, and vllm with PYTHON=.venv-vllm/bin/python, on a CPU. What they measure then means
# nothing.
#
# Needs torch with CUDA, cupy, pytest, hypothesis, numpy, xxhash and prometheus-client, and no installation of
# lmtier; vllm needs vLLM too. Results go to OUT, or to bench/results/<GPU>-<date>.
# LIMIT is the most seconds that the stages take together: the later ones get what the earlier ones leave.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD:$PWD/backends:$PWD/integrations:$PWD/bench${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/lmtier-cupy}
PYTHON=${PYTHON:-python3}
TESTS=("$PYTHON" -m pytest -q -p no:cacheprovider)
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | tr 'A-Z ' 'a-z-')
OUT=${OUT:-bench/results/${gpu:-no-gpu}-$(date +%F)}
mkdir -p "$OUT"
LIMIT=${LIMIT:-7200}
failed=0
simulated=()
if [ "${1:-}" = --simulated ]; then
    simulated=(--simulated)
    shift
fi

within() {  # seconds: so many, or those that are left
    local left=$((LIMIT - SECONDS))
    echo $((left < $1 ? left : $1))
}

stage() {  # name, seconds, command...
    local name=$1 limit
    limit=$(within "$2")
    shift 2
    printf '\n== %s\n' "$name"
    if [ "$limit" -le 0 ]; then
        failed=1
        printf '%s: left out, the %s s of LIMIT are over\n' "$name" "$LIMIT"
        return
    fi
    timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.txt" || { failed=1; printf '%s: FAILED\n' "$name"; }
}

for each in "$@"; do
    case ${simulated[*]}$each in  # rehearsals may take long: they compute what a GPU does
        --simulatedtoy) stage toy 1200 "$PYTHON" bench/gpu_toy.py --simulated --limit 1100 --json "$OUT/toy.json" ;;
        *probe) stage probe 200 "$PYTHON" bench/gpu_probe.py "${simulated[@]}" --json "$OUT/probe.json" ;;
        toy) stage toy 260 "$PYTHON" bench/gpu_toy.py --limit "$(within 200)" --json "$OUT/toy.json" ;;
        --simulatedtests) stage tests 1800 "${TESTS[@]}" tests/copy/test_cuda_*.py tests/bench tests/test_toy_engine.py ;;
        --simulatedbench) stage bench 300 "$PYTHON" bench/gpu_simulated.py "$OUT/bench.json" ;;
        --simulatedtransformers) stage transformers 240 "$PYTHON" bench/gpu_transformers.py --device cpu ;;
        --simulatedvllm) stage vllm 600 "$PYTHON" bench/gpu_vllm.py equal ttft --device cpu ;;
        tests) stage tests 400 "${TESTS[@]}" --continue-on-collection-errors tests/gpu --junit-xml "$OUT/tests.xml" ;;
        bench) stage bench 300 "$PYTHON" -m lmtier bench --gpu --save "$OUT/bench.json" ;;
        sanitize)
            # Without its cache torch asks the driver for each tensor, so that what overruns one is seen.
            export PYTORCH_NO_CUDA_MEMORY_CACHING=1 LMTIER_EXAMPLES=8
            for tool in memcheck initcheck; do
                stage $tool 250 compute-sanitizer --tool $tool --error-exitcode 9 \
                    "${TESTS[@]}" tests/gpu/test_gpu.py -k "layout or canary"
            done
            unset PYTORCH_NO_CUDA_MEMORY_CACHING LMTIER_EXAMPLES
            ;;
        transformers)
            stage transformers 240 "$PYTHON" bench/gpu_transformers.py --json "$OUT/transformers.json"
            ;;
        vllm)  # it ends by itself, because a timeout would leave its engines on the GPU
            stage vllm 600 "$PYTHON" bench/gpu_vllm.py ttft graphs equal --budget "$(($(within 560) - 20))" \
                --json "$OUT/vllm.json"
            ;;
        *) echo "no stage $each ${simulated[*]}; they are in this script's first lines" >&2; exit 2 ;;
    esac
done
exit $failed

#!/usr/bin/env bash
# What needs a GPU, in one run: tests/gpu.sh OUT [STAGE ...]; without stages all of them, in this order:
#   tests     pytest -m gpu; beside it `rnnt check` and the example on each backend (some 170 s on 16 cores)
#   target    every backend at the shapes target and speech, tiled and untiled: OUT/target.json, OUT/target-reference.json
#   shapes    every shape, tiled, on triton and compiled: OUT/shapes.json (some 150 s)
#   graph     triton's steps from a CUDA graph: OUT/graph.json
#   exact     triton with no row left out of the backward pass: OUT/exact.json
#   sharp     triton with an output layer eight times as sharp: OUT/sharp.json
#   float32   triton at target in float32: OUT/float32.json
#   variants  triton's target step, from a graph, by activation and with dropout: OUT/variant-*.json
#   tiles     triton's target step by tile size: OUT/tiles.json
#   model     the FastConformer step with each loss, on both data sets: OUT/model.json, OUT/model.png
#   largest   the largest batch of LibriSpeech's lengths in 40 GiB, with each loss: OUT/largest.json, OUT/largest.png
# Times mean something only where nothing else runs.  PYTHON names another interpreter, PYTEST_ARGS what pytest gets with
# `tests` (-n 12), RNNT_DATA the folder of the example's recordings, RNNT_COMMIT what the figures are of.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath "${1:?usage: tests/gpu.sh OUT [STAGE ...]}")
shift
python=${PYTHON:-python3}
export PYTHONPATH=$PWD
bench=("$python" -m pytest tests/benchmarks -q -p no:cacheprovider)
shapes=(--rnnt-shape target --rnnt-shape target-1025 --rnnt-shape ragged --rnnt-shape small --rnnt-shape long)
shapes+=(--rnnt-shape bigvocab --rnnt-shape speech)
failed=()

stage() { # NAME COMMAND ...: its output goes to OUT/NAME.txt
    echo "$1"
    "${@:2}" >"$out/$1.txt" 2>&1 || failed+=("$1")
    tail -n 3 "$out/$1.txt"
}

tests() {
    local backend jobs=()
    for backend in reference compiled triton; do
        "$python" -m examples.speech.train --device cuda --dtype bf16 --backend "$backend" --epochs 10 --seed 0 \
            --out "$out/run-$backend" >"$out/example-$backend.txt" 2>&1 &
        jobs+=("$!")
    done
    "$python" -m rnnt check --device cuda --dtype float32 --dtype bfloat16 --dtype float64 >"$out/check.txt" 2>&1 &
    jobs+=("$!")
    # shellcheck disable=SC2086
    stage tests "$python" -m pytest -m gpu -q -p no:cacheprovider --durations 12 \
        -W ignore::pytest_benchmark.logger.PytestBenchmarkWarning ${PYTEST_ARGS:-}
    for job in "${jobs[@]}"; do
        wait "$job" || failed+=("example or check")
    done
    tail -n 2 "$out/check.txt"
}

target() {
    local both=(--rnnt-shape target --rnnt-shape speech)
    stage target "${bench[@]}" "${both[@]}" --rnnt-backend triton --rnnt-backend compiled \
        --benchmark-json "$out/target.json"
    stage target-reference "${bench[@]}" "${both[@]}" --rnnt-backend reference -k both --rnnt-rounds 3 \
        --benchmark-json "$out/target-reference.json"
}

shapes() {
    stage shapes "${bench[@]}" "${shapes[@]}" --rnnt-tile-rows auto --rnnt-backend triton --rnnt-backend compiled -k both \
        --benchmark-json "$out/shapes.json"
}

graph() {
    stage graph "${bench[@]}" --rnnt-graph --rnnt-tile-rows auto "${shapes[@]}" \
        --benchmark-json "$out/graph.json"
}

exact() {
    stage exact "${bench[@]}" --rnnt-occupancy-threshold 0 --rnnt-tile-rows auto --rnnt-backend triton -k both \
        "${shapes[@]}" --benchmark-json "$out/exact.json"
}

sharp() {
    stage sharp "${bench[@]}" --rnnt-scores 8 --rnnt-tile-rows auto --rnnt-backend triton -k both \
        "${shapes[@]}" --benchmark-json "$out/sharp.json"
}

float32() {
    stage float32 "${bench[@]}" --rnnt-dtype float32 --rnnt-backend triton -k both --rnnt-rounds 5 \
        --rnnt-shape target --benchmark-json "$out/float32.json"
}

variants() {
    local variant graph=(--rnnt-graph --rnnt-tile-rows auto --rnnt-shape target)
    for variant in "--rnnt-activation relu" "--rnnt-activation tanh" "--rnnt-activation sigmoid" "--rnnt-dropout 0.1"; do
        # shellcheck disable=SC2086
        stage "variant-${variant##* }" "${bench[@]}" "${graph[@]}" $variant \
            --benchmark-json "$out/variant-${variant##* }.json"
    done
}

tiles() {
    stage tiles "$python" -m rnnt bench --shape target --backend triton --tile-rows auto --tile-rows none \
        --tile-rows 4096 --tile-rows 8192 --tile-rows 16384 --tile-rows 32768 --tile-rows 65536 --json "$out/tiles.json"
}

model() {
    stage model "$python" -m benchmarks.model --losses none triton compiled torchaudio dense-8 \
        --json "$out/model.json" --picture "$out/model.png"
}

largest() {
    stage largest "$python" -m benchmarks.model --data librispeech --losses none triton torchaudio dense-8 \
        --only-largest --memory-limit 40 --json "$out/largest.json" --picture "$out/largest.png"
}

stages=("$@")
((${#stages[@]})) || stages=(tests target shapes graph exact sharp float32 variants tiles model largest)
for name in "${stages[@]}"; do
    case $name in
    tests | target | shapes | graph | exact | sharp | float32 | variants | tiles | model | largest) ;;
    *) echo "gpu.sh: '$name' is none of the stages above" >&2 && exit 2 ;;
    esac
done
mkdir -p "$out"
for name in "${stages[@]}"; do
    "$name"
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi

#!/usr/bin/env bash
# Map or read again on a CPU: Qwen2.5-Coder 0.5B -> 1.5B, bfloat16, one thread. Usage: run.sh SOURCE TARGET FOLDER [option ...]
# SOURCE and TARGET: hub ids or folders. FOLDER gets one JSON file a map. Options go to every run, e.g. --lengths 64 512.
# The maps are of random weights, which cost what fitted ones of the same k and support do.
set -euo pipefail
source=$1 target=$2 folder=$3
shift 3
mkdir -p "$folder"
export OMP_NUM_THREADS=1
for map in full_head:8 full_head:all head_local:8 head_local:all; do
    python -m kvmap.benchmark.latency --source "$source" --target "$target" --dtype bfloat16 --threads 1 \
        --support "${map%:*}" --top-k "${map#*:}" --lengths 64 256 512 1024 --repeats 5 --warmup 1 \
        --paths batched per_head per_head_stripped reference --output "$folder/${map%:*}_${map#*:}.json" "$@"
done

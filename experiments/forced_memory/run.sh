#!/usr/bin/env bash
# Calibration unforced and within a memory budget. Usage: run.sh SOURCE TARGET FOLDER
# SOURCE and TARGET: Qwen2.5-Coder 0.5B and 1.5B, hub ids or folders. FOLDER gets outputs and results.csv.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source=$1 target=$2 folder=$3
rm -f "$folder/results.csv"
offloaded=(calibration.sequential=true pair.source.device_map=disk pair.target.device_map=disk)
python "$here/forced_memory.py" tiny "$folder" --budget 0.6 --both pair=tiny calibration.n_sequences=40 \
    --forced "${offloaded[@]}" calibration.max_spill_gib=0.04
python "$here/forced_memory.py" qwen "$folder" --budget 1.25 --both pair=qwen25coder_05b_15b \
    "pair.source.id=$source" "pair.target.id=$target" pair.source.dtype=bfloat16 pair.target.dtype=bfloat16 \
    calibration.n_sequences=12 calibration.sequence_length=128 calibration.batch_size=2 calibration.held_out_share=0.25 \
    mapper.top_k=2 selection=proportional calibration.mode=selected mapper.allow_few_rows=true \
    --forced "${offloaded[@]}" calibration.max_spill_gib=0.05

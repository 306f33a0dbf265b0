#!/usr/bin/env bash
# The maps on two real models, Qwen2.5-Coder 0.5B -> 1.5B. Usage: run_qwen.sh TEXT.jsonl QUESTIONS.jsonl [override ...]
# TEXT: {"text": ...} a line; QUESTIONS: {"context", "choices", "answer"} a line. Further overrides go to every run, e.g.
# pair.source.id=<folder> pair.target.id=<folder> where the hub is out of reach.
set -euo pipefail
text=$1 questions=$2
shift 2
kvmap=(python -m kvmap.run pair=qwen25coder_05b_15b pair.source.dtype=bfloat16 pair.target.dtype=bfloat16
    calibration=jsonl calibration.data.path="$text" calibration.batch_size=3 calibration.product_dtype=float32
    evaluation=jsonl evaluation.perplexity.data.path="$text" "evaluation.jsonl.paths=[$questions]"
    evaluation.jsonl.limit=105 evaluation.generate=false evaluation.batch_size=15 evaluation.perplexity.n_sequences=6
    evaluation.arms='[target,source,mapped,no_context]' 'stages=[plan,calibrate,fit,diagnose,evaluate,report]'
    diagnostics.n_sequences=3 "$@")

# 1. Full-head ridge on every layer and the target's layer 0: 240 x 512 tokens, kept on disk.
"${kvmap[@]}" study=supports_qwen calibration.n_sequences=240 calibration.native_layers=4 calibration.keep_captures=true \
    mapper=linear mapper.native_layers=1

# 2. Head-local ridge, 12 source layers and layer 0, rows weighted by the target's attention: 90 x 512 tokens.
"${kvmap[@]}" study=supports_qwen calibration.n_sequences=90 calibration.mode=head_local calibration.native_layers=1 \
    mapper=weighted mapper.top_k=12 mapper.native_layers=1

# 3. The same without weights.
"${kvmap[@]}" study=supports_qwen calibration.n_sequences=90 calibration.mode=head_local calibration.native_layers=1 \
    mapper=head_local mapper.top_k=12 mapper.native_layers=1

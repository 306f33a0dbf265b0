#!/usr/bin/env bash
# The maps on two real models, Qwen2.5-Coder 0.5B -> 1.5B. Usage: run_qwen.sh TEXT.jsonl QUESTIONS.jsonl [override ...]
# TEXT: {"text": ...} a line; QUESTIONS: {"context", "choices", "answer"} a line. Further overrides go to every run, e.g.
# pair.source.id=<folder> pair.target.id=<folder> where the hub is out of reach.
set -euo pipefail
text=$1 questions=$2
shift 2
kvmap=(python -m kvmap.run study=supports_qwen pair=qwen25coder_05b_15b
    pair.source.dtype=bfloat16 pair.target.dtype=bfloat16
    calibration=jsonl calibration.data.path="$text" calibration.batch_size=3 calibration.product_dtype=float32
    evaluation=jsonl evaluation.perplexity.data.path="$text" "evaluation.jsonl.paths=[$questions]"
    evaluation.generate=false evaluation.batch_size=15 evaluation.perplexity.n_sequences=6
    evaluation.arms='[target,source,mapped,no_context]' 'stages=[plan,calibrate,fit,diagnose,evaluate,report]'
    diagnostics.n_sequences=3 "$@")

# 1. Full-head ridge on every layer and the target's layer 0: 240 x 512 tokens, kept on disk; 200 questions.
prose=(calibration.n_sequences=240 calibration.native_layers=4 calibration.keep_captures=true evaluation.jsonl.limit=200
    mapper.native_layers=1)
"${kvmap[@]}" "${prose[@]}" mapper=linear

# 2. The other heads' features penalised apart, both penalties chosen on held-out sequences.
"${kvmap[@]}" "${prose[@]}" mapper=banded 'mapper.tuning.cross_ratio=[1,10,100]' 'mapper.tuning.native_ratio=[1]'

# 3. Keys and values from both.
"${kvmap[@]}" "${prose[@]}" mapper=linear mapper.regressors=both_kinds calibration.regressors=both_kinds calibration.native_layers=1

# 4. A network on what ridge missed of the values; it reads the matched heads of 12 layers.
network=(mapper.mlp.support=head_local mapper.mlp.top_k=12 'mapper.mlp.hidden=[256]' mapper.mlp.epochs=3
    mapper.mlp.compute_dtype=bfloat16)
"${kvmap[@]}" "${prose[@]}" mapper=residual mapper.mlp.form=residual_values "${network[@]}"

# 5. and 6. Ridge as in 1, and with four native layers, where calibration knows the questions' kind: the same prose, and 300 questions
# that are not asked. Perplexity is of the same sequences.
traffic=$(mktemp -d)/traffic.jsonl
python experiments/supports/traffic.py "$text" "$questions" --asked 200 --prose 848 >"$traffic"
for native in 1 4; do
    "${kvmap[@]}" "${prose[@]}" calibration.data.path="$traffic" calibration.n_sequences=276 \
        evaluation.perplexity.data.skip=848 mapper=linear mapper.native_layers=$native
done

# 7. and 8. Head-local ridge, 12 source layers and layer 0, with and without rows weighted by the target's attention:
# 90 x 512 tokens; 105 questions.
few=(calibration.n_sequences=90 calibration.mode=head_local calibration.native_layers=1 evaluation.jsonl.limit=105
    mapper.top_k=12 mapper.native_layers=1)
"${kvmap[@]}" "${few[@]}" mapper=weighted
"${kvmap[@]}" "${few[@]}" mapper=head_local

# 9. A network in place of the values' ridge; keys stay linear.
"${kvmap[@]}" "${prose[@]}" mapper=mlp mapper.mlp.form=values_only mapper.mlp.standardise=true "${network[@]}"

#!/usr/bin/env bash
# Qwen2.5-Coder 0.5B and 1.5B, both ways: what three maps keep of nine sets of questions, and the preflight, which also
# reads 36 of their prompts. DATA: a folder with text.jsonl (prose) and the sets. Further overrides go to every run.
set -euo pipefail
data=${DATA:?a folder with text.jsonl and the sets of questions}
sets=(code_line_description disambiguation_qa general_knowledge goal_step_wikihow intent_recognition physics strategyqa temporal_sequences winowhy)
files=$(printf "$data/%s.jsonl," "${sets[@]}")
pair=(pair=qwen25coder_05b_15b pair.source.dtype=bfloat16 pair.target.dtype=bfloat16)
text=(calibration=jsonl "calibration.data.path=$data/text.jsonl" calibration.n_sequences=240 calibration.batch_size=3
    calibration.product_dtype=float32 calibration.keep_captures=true calibration.native_layers=4)
asked=(evaluation=jsonl "evaluation.jsonl.paths=[${files%,}]" evaluation.jsonl.limit=15 "evaluation.perplexity.data.path=$data/text.jsonl"
    evaluation.perplexity.n_sequences=6 evaluation.generate=false evaluation.batch_size=15 "evaluation.arms=[target,mapped,no_context]")
before=("preflight.mappers=[head_local,native_features_2,banded]" "preflight.prompts.paths=[${files%,}]" preflight.prompts.n=36)
for direction in up down; do
    for mapper in linear native_features_2 head_local; do
        python -m kvmap.run study=preflight_qwen "stages=[preflight,fit,evaluate]" "${pair[@]}" "${text[@]}" "${asked[@]}" "${before[@]}" \
            mapper=$mapper mapper.allow_few_rows=true direction=$direction tracking=none "$@"
    done
done

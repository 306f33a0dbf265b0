#!/usr/bin/env bash
# Qwen2.5-Coder 0.5B -> 1.5B on real text. Usage: run.sh TEXT.jsonl QUESTIONS.jsonl [override ...]
# TEXT: {"text": ...} a line; QUESTIONS: {"context", "choices", "answer"} a line. Further overrides go to every run, e.g.
# pair.source.id=<folder> pair.target.id=<folder> where the hub is out of reach.
set -euo pipefail
text=$1 questions=$2
shift 2
kvmap=(python -m kvmap.run experiment=first_transfer calibration.data.path="$text" "$@")

# 1. Perplexity: native_head {1, 0} x support x top_k {all, 8, 1}, from two calibrations.
"${kvmap[@]}"

# 2. Every control once, the latency of the hand-off, and questions whose answer stands in the context.
"${kvmap[@]}" study=first_transfer_controls \
    hydra.sweeper.params='{transfer.native_head: "1,0", mapper: head_local, mapper.top_k: all}' \
    'evaluation.arms=[target,source,mapped,bias_only,raw,random,no_context]' \
    "evaluation.jsonl.paths=[$questions]" evaluation.jsonl.limit=30 evaluation.generate=false \
    evaluation.perplexity.n_sequences=4 \
    'stages=[plan,calibrate,fit,diagnose,evaluate,benchmark,report]' 'benchmark.lengths=[128,512]' benchmark.repeats=3

#!/usr/bin/env bash
# The same knobs on two real models, Qwen2.5-Coder 0.5B -> 1.5B. Usage: run_qwen.sh TEXT.jsonl QUESTIONS.jsonl [override ...]
# TEXT: {"text": ...} a line; QUESTIONS: {"context", "choices", "answer"} a line. Further overrides go to every run, e.g.
# pair.source.id=<folder> pair.target.id=<folder> where the hub is out of reach. Calibration, text and questions are those
# of the first run of experiments/supports/run_qwen.sh, whose captures, moments and answers are found where that has run.
set -euo pipefail
text=$1 questions=$2
shift 2
kvmap=(python -m kvmap.run -m study=frontier_qwen pair=qwen25coder_05b_15b
    pair.source.dtype=bfloat16 pair.target.dtype=bfloat16
    calibration=jsonl calibration.data.path="$text" calibration.batch_size=3 calibration.product_dtype=float32
    calibration.n_sequences=240 calibration.native_layers=4 calibration.keep_captures=true mapper=linear
    evaluation=jsonl evaluation.perplexity.data.path="$text" "evaluation.jsonl.paths=[$questions]"
    evaluation.jsonl.limit=80 evaluation.generate=false evaluation.batch_size=15 evaluation.perplexity.n_sequences=4
    'evaluation.cost.lengths=[256]' evaluation.cost.repeats=2 evaluation.cost.warmup=1 'stages=[fit,evaluate]' "$@")
arms='evaluation.arms=[target,source,mapped,no_context]'
controlled='evaluation.arms=[target,source,mapped,bias_only,no_context]'

"${kvmap[@]}" "$controlled" mapper.native_layers=1 transfer.recompute_rule=attention transfer.recompute_share=0.05,0.15
"${kvmap[@]}" "$controlled" mapper.native_layers=0,1,4
"${kvmap[@]}" "$arms" mapper.native_layers=1 transfer.recompute_rule=random,map_error transfer.recompute_share=0.15
"${kvmap[@]}" "$arms" mapper.native_layers=1 transfer.hold_back=16

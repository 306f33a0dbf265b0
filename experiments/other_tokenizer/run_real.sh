#!/usr/bin/env bash
# SmolLM2-135M -> Qwen2.5-Coder-0.5B: two families, two tokenizers. Usage: run_real.sh TEXT.jsonl QUESTIONS.jsonl [override ...]
# TEXT: {"text": ...} a line; QUESTIONS: {"context", "choices", "answer"} a line. Further overrides go to every run, e.g.
# pair.source.id=<folder> pair.target.id=<folder> where the hub is out of reach.
set -euo pipefail
text=$1 questions=$2
shift 2
for rule in last ended; do
    kvmap=(python -m kvmap.run study=other_tokenizer_real pair=custom pair.source.id=HuggingFaceTB/SmolLM2-135M-Instruct
        pair.target.id=Qwen/Qwen2.5-Coder-0.5B-Instruct pair.source.dtype=bfloat16 pair.target.dtype=bfloat16
        pair.alignment=spans pair.alignment_rule=$rule calibration=jsonl calibration.data.path="$text"
        calibration.n_sequences=60 calibration.sequence_length=256 calibration.batch_size=4
        calibration.product_dtype=float32 calibration.packing=packed calibration.native_layers=1
        calibration.mode=head_local mapper=head_local mapper.top_k=12 mapper.native_layers=1 selection=r2
        evaluation=jsonl "evaluation.jsonl.paths=[$questions]" evaluation.jsonl.limit=30 evaluation.generate=false
        evaluation.perplexity.data.path="$text" evaluation.perplexity.n_sequences=12
        evaluation.perplexity.prefix_tokens=128 evaluation.perplexity.continuation_tokens=128
        'evaluation.arms=[target,mapped,bias_only,no_context]' tracking=none "$@")
    "${kvmap[@]}" stages=[calibrate]
    "${kvmap[@]}" stages=[fit,diagnose,evaluate] 'diagnostics.texts=[]'
done

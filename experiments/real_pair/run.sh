#!/usr/bin/env bash
# Two real models, both directions, on questions, conversations and text. Usage: run.sh DATA [override ...]
# DATA holds text.jsonl ({"text"} a line), coqa.jsonl and files of {"context", "choices", "answer"} lines. Overrides go to
# every run, e.g. pair.source.id=<folder> pair.target.id=<folder> where the hub is out of reach.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
data=$1
shift
tasks=(code_line_description disambiguation_qa general_knowledge goal_step_wikihow intent_recognition physics strategyqa
    temporal_sequences winowhy)
paths=("${tasks[@]/#/$data/}")
paths=("${paths[@]/%/.jsonl}")
asked=15 held=5
kvmap=(python -m kvmap.run study=real_pair pair=qwen25coder_05b_15b pair.source.dtype=bfloat16 pair.target.dtype=bfloat16
    calibration=jsonl calibration.data.path="$data/text.jsonl" calibration.n_sequences=240 calibration.batch_size=3
    calibration.product_dtype=float32 calibration.keep_captures=true calibration.native_layers=4
    evaluation=jsonl "evaluation.jsonl.paths=[$(IFS=, && echo "${paths[*]}")]" evaluation.jsonl.limit=$asked
    'evaluation.tasks=[{name:mmlu_dev,limit:30}]'
    evaluation.perplexity.data.path="$data/text.jsonl" evaluation.perplexity.n_sequences=6
    evaluation.conversation.path="$data/coqa.jsonl" evaluation.conversation.limit=$held evaluation.conversation.max_turns=6
    evaluation.conversation.max_new_tokens=12 evaluation.generate=false evaluation.batch_size=15
    'evaluation.arms=[target,source,mapped,bias_only,no_context]' 'stages=[plan,calibrate,fit,evaluate,report]' "$@")
network=(mapper=residual mapper.mlp.form=residual_values mapper.mlp.support=head_local mapper.mlp.top_k=12
    'mapper.mlp.hidden=[256]' mapper.mlp.epochs=3 mapper.mlp.compute_dtype=bfloat16)

# calibration that has read other questions of every set, and other conversations; 848 documents are the 240 sequences of prose
traffic=$(mktemp -d)/traffic.jsonl
python "$here/../supports/traffic.py" "$data/text.jsonl" "${paths[@]}" --prose 848 --asked $asked --others 30 \
    --conversations "$data/coqa.jsonl" --held $held --other-conversations 20 >"$traffic"
seen=(calibration.data.path="$traffic" calibration.n_sequences=285 evaluation.perplexity.data.skip=848)

for direction in up down; do
    "${kvmap[@]}" direction=$direction mapper=linear mapper.native_layers=1
    "${kvmap[@]}" direction=$direction "${network[@]}" mapper.native_layers=1
    "${kvmap[@]}" direction=$direction mapper=linear mapper.native_layers=1 "${seen[@]}"
done

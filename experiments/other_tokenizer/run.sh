#!/usr/bin/env bash
# Sources that read the target's text with another tokenizer. Usage: run.sh PIECES [override ...]
# PIECES: folder of two models that read word pieces; pieces.py trains them there where they are missing (minutes).
# Further overrides go to every run.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
pieces=$1
shift
for model in small medium; do
    [ -f "$pieces/$model/config.json" ] || python "$here/pieces.py" --model tiny-$model --out "$pieces/$model"
done
kvmap=(python -m kvmap.run -m study=other_tokenizer pair=custom pair.source.dtype=float32 pair.target.dtype=float32
    calibration.n_sequences=120 calibration.native_layers=1 'calibration.seed=${calibration.data.seed}'
    evaluation.generate=false evaluation.world.n_per_kind=30 'evaluation.world.seed=${calibration.data.seed}'
    'evaluation.perplexity.data.seed=${calibration.data.seed}' 'stages=[fit,diagnose,evaluate]' tracking=none
    mapper.native_layers=0,1 "calibration.data.seed=${SEEDS:-1000,1001}")

alone='evaluation.arms=[target,source,mapped,bias_only,no_context]' # one tokenizer: the source can answer itself
apart='evaluation.arms=[target,mapped,bias_only,no_context]'

# What the target reads: words, then pieces. First the source of one tokenizer, then the same size under the other one.
words=(pair.target.id=zoo:tiny-large)
"${kvmap[@]}" "${words[@]}" pair.source.id=zoo:tiny-medium "$alone" "$@"
"${kvmap[@]}" "${words[@]}" pair.source.id="$pieces/medium" pair.alignment=spans pair.alignment_rule=last,mean "$apart" "$@"

parts=(pair.target.id="$pieces/medium")
"${kvmap[@]}" "${parts[@]}" pair.source.id="$pieces/small" "$alone" "$@"
"${kvmap[@]}" "${parts[@]}" pair.source.id=zoo:tiny-small pair.alignment=spans pair.alignment_rule=last,ended "$apart" "$@"

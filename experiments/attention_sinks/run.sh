#!/usr/bin/env bash
# The shipped family, 12 ordered pairs x 3 seeds: every setting with all source layers; then what is lost by keys and what by values,
# beside the mean cache. Maps from one source layer are the runs of experiments/predicting_retention. Further overrides go to every run.
set -euo pipefail
kvmap=(python -m kvmap.run experiment=attention_sinks "$@")
"${kvmap[@]}"
"${kvmap[@]}" study=attention_sinks_oracles stages=[fit,evaluate] transfer.native_head=0,1 calibration.native_head=null \
    'evaluation.arms=[target,source,mapped,own_keys,own_values,bias_only,no_context]'

#!/usr/bin/env bash
# The shipped family, 12 ordered pairs x 3 seeds: every setting with all source layers; the first token mapped or exact with one;
# and what is lost by keys and what by values, beside the mean cache. Further overrides go to every run.
set -euo pipefail
kvmap=(python -m kvmap.run experiment=attention_sinks "$@")
"${kvmap[@]}"
"${kvmap[@]}" mapper.top_k=1 transfer.native_head=0,1 calibration.native_head=null
"${kvmap[@]}" study=attention_sinks_oracles stages=[fit,evaluate] transfer.native_head=0,1 calibration.native_head=null \
    'evaluation.arms=[target,source,mapped,own_keys,own_values,bias_only,no_context]'

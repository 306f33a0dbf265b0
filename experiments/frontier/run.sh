#!/usr/bin/env bash
# Quality against compute on the shipped family: one knob a sweep, two pairs. Further overrides go to every run.
set -euo pipefail
kvmap=(python -m kvmap.run experiment=frontier "$@")

"${kvmap[@]}" mapper.native_layers=0,1,2,3,4
"${kvmap[@]}" transfer.hold_back=4,16,64
"${kvmap[@]}" transfer.recompute_rule=attention,map_error,random transfer.recompute_share=0.01,0.05,0.1,0.25
# two knobs together
"${kvmap[@]}" mapper.native_layers=1 transfer.recompute_rule=attention transfer.recompute_share=0.05,0.1,0.25
"${kvmap[@]}" transfer.hold_back=16 transfer.recompute_rule=attention transfer.recompute_share=0.05,0.1,0.25

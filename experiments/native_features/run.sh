#!/usr/bin/env bash
# The shipped family: 0, 1 and 2 native layers on 12 ordered pairs x 3 seeds; more where the target has 5 or 6 layers.
# Further overrides go to every run.
set -euo pipefail
kvmap=(python -m kvmap.run experiment=native_features "$@")
"${kvmap[@]}"
"${kvmap[@]}" calibration.native_layers=4 mapper.native_layers=3,4 pair=tiny,tiny_medium_large,tiny_unmatched direction=up

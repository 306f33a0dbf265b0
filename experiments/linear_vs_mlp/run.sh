#!/usr/bin/env bash
# The shipped family: every setting on 12 ordered pairs x 3 seeds. Further overrides go to every run.
set -euo pipefail
python -m kvmap.run experiment=linear_vs_mlp "$@"

#!/usr/bin/env bash
# Which map wins where? The shipped family: 3 ordered pairs x 3 seeds x 8 maps. Further overrides go to every run.
set -euo pipefail
python -m kvmap.run experiment=supports "$@"

#!/usr/bin/env bash
# The shipped family: 12 ordered pairs x 2 maps x 3 ways to carry a conversation x 3 seeds. Further overrides go to every run.
set -euo pipefail
python -m kvmap.run experiment=direction "$@"

#!/usr/bin/env bash
# The shipped family: seven mappers on 12 ordered pairs x 3 seeds, a preflight before each. Further overrides go to every run.
set -euo pipefail
python -m kvmap.run experiment=preflight "$@"

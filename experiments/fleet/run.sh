#!/usr/bin/env bash
# The four shipped models as one fleet: 2 mappers x 3 seeds. Further overrides go to every run.
set -euo pipefail
python -m kvmap.run experiment=fleet "$@"

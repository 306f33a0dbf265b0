#!/usr/bin/env bash
# The shipped family: every domain on 12 ordered pairs x 3 seeds. Further overrides go to every run.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
texts=$(mktemp -d)/domains.jsonl
python "$here/text.py" >"$texts"
python -m kvmap.run experiment=calibration_domain calibration.data.path="$texts" "$@"

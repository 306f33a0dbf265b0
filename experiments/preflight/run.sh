#!/usr/bin/env bash
# The shipped family: seven mappers on 12 ordered pairs x 3 seeds, a preflight before each, which also reads 48 prompts without
# answers. Further overrides go to every run.
set -euo pipefail
prompts=$(mktemp -d)/prompts.jsonl
python experiments/preflight/prompts.py "$prompts"
python -m kvmap.run experiment=preflight "preflight.prompts.paths=[$prompts]" preflight.prompts.n=48 "$@"

#!/usr/bin/env bash
# Time to first token through two vLLM engines on this machine, and through a gateway before them: SMALL and LARGE are model folders, MAPPER
# a fitted mapper's folder.
# Further arguments go to the bench. Needs the environment of `make test-serving`.
set -euo pipefail
: "${SMALL:?a model folder}" "${LARGE:?a model folder}" "${MAPPER:?the folder of a mapper}"
python=${PYTHON:-.venv/serving/bin/python}
caches=$(mktemp -d)
export OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
"$python" -m kvmap.serving.engine --role source --model "$SMALL" --storage "$caches" --port 8101 --max-model-len 2304 & source=$!
"$python" -m kvmap.serving.engine --role target --model "$LARGE" --storage "$caches" --port 8102 --max-model-len 2304 --mapper "$MAPPER" & target=$!
"$python" -m kvmap.serving.gateway --source-url http://127.0.0.1:8101 --target-url http://127.0.0.1:8102 --port 8100 --quiet & gateway=$!
trap 'kill $gateway $source $target; rm -rf "$caches"' EXIT
for port in 8101 8102 8100; do until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do sleep 2; done; done
"$python" -m kvmap.serving.bench --source-url http://127.0.0.1:8101 --target-url http://127.0.0.1:8102 --gateway-url http://127.0.0.1:8100 --tokenizer "$SMALL" --out outputs/serving "$@"

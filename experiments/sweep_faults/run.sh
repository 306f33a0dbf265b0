#!/usr/bin/env bash
# Both measurements on a two-node Slurm that is installed and started here (root, Debian or Ubuntu). About half an hour on two
# idle cores. Usage: run.sh [folder]; each also runs alone, smaller with --points N.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
results=${1:-$(mktemp -d)}
cd "$here/../.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
python "$here/sharing.py" "$results/sharing"
python "$here/faults.py" "$results/faults"

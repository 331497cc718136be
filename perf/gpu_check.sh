#!/usr/bin/env bash
# Everything that needs a GPU, in at most 9 minutes: first what nobody ran before, then a build of
# what can be built, the GPU tests, the benchmarks; a short table last, results in ${OUT}.
#
#   bash perf/gpu_check.sh            (OUT: folder of results, default perf/results; PYTHON)
#
# Needs Python 3.11 or newer with torch and Triton, and no network. Exit status: 0 all passed, 1
# something failed or had no time left, 2 no GPU. A build that is left out for want of tools is no
# failure, nor is replica synchronisation then, which needs it; Triton kernels do not.

set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-perf/results}
[ -x .venv/bin/python ] && default=.venv/bin/python || default=python3
PYTHON=${PYTHON:-$default}
BUDGET=${BUDGET:-530} # seconds for everything
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
      3) [ "$name" = build ] && verdict="left out" || verdict=FAIL ;;
      5) verdict="FAIL (no test found)" ;; # pytest
      124 | 137) verdict="FAIL (over $limit s)" ;;
      *) verdict=FAIL ;;
    esac
  fi
  printf '%-28s %-22s %4d s\n' "$name" "$verdict" $((SECONDS - before)) >>"$steps"
}

built() {
  "$PYTHON" -c 'from relibra_kernels import _planner, _replica_sync' 2>/dev/null
}

build() { # status 3: left out, for a reason that is printed
  if built; then
    echo "the native parts are there"
  elif ! "$PYTHON" -c 'import pybind11, setuptools' 2>/dev/null; then
    echo "the native parts are not built: $PYTHON needs pybind11 and setuptools"
    return 3
  elif ! command -v cmake >/dev/null || ! command -v ninja >/dev/null; then
    echo "the native parts are not built: needs cmake and ninja"
    return 3
  else
    "$PYTHON" setup.py -q build_ext --inplace
  fi
}
export -f build built
export PYTHON

SYNC='sync|heap|local|provider|transport' # files of replica synchronisation
KERNELS='sync_(engine|kernel|cuda|gpu)|replica_sync' # of these, those that launch our CUDA kernels

# gpu_tests NAME SECONDS OPTION PATTERN PREFIX...: tests marked gpu, in the files that grep with
# this option chooses by name. Only files with such a test: others may import what a GPU machine
# lacks. No option of a plugin.
gpu_tests() {
  local name=$1 limit=$2 option=$3 pattern=$4 files
  shift 4
  mapfile -t files < <(grep -rlE 'mark\.gpu\b' tests --include='test_*.py' | sort |
    grep "$option" "$pattern")
  if [ "$option" = -E ] && ! built; then # what needs the native parts
    printf '%-28s %-22s\n' "$name" "left out (not built)" >>"$steps"
  elif [ "${#files[@]}" -eq 0 ]; then
    printf '%-28s %-22s\n' "$name" "NOT RUN (no test)" >>"$steps"
  else
    step "$name" "$limit" "$@" "$PYTHON" -m pytest -q -m gpu "${files[@]}" -o addopts= \
      --import-mode=importlib --continue-on-collection-errors -p no:cacheprovider
  fi
}

# What nobody has run comes before all else: it needs no build. Shares of the budget add up to less
# than it, so a step that hangs cannot take the time of the next ones.
step "first on a GPU" 90 "$PYTHON" perf/gpu_first.py --json "$OUT/gpu_first.json"
step "build" 60 bash -c build
if ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
  printf '%-28s %-22s\n' "tests marked gpu" "NOT RUN (no pytest)" >>"$steps"
else
  # In two steps, so that neither can take the other's time: replica synchronisation with its
  # `local` transport (8 ranks on this GPU), then everything else.
  gpu_tests "sync tests, 8 local ranks" 60 -E "$SYNC"
  gpu_tests "other tests marked gpu" 55 -vE "$SYNC"
  # compute-sanitizer only on what launches the CUDA kernels of cuda/, in small sizes: accesses,
  # hazards of shared memory, and barriers that not all threads of a block reach.
  sanitizer=$(command -v compute-sanitizer || find /usr/local/cuda*/bin -name compute-sanitizer \
    2>/dev/null | head -1)
  for tool in memcheck racecheck synccheck; do
    if [ -z "$sanitizer" ]; then
      printf '%-28s %-22s\n' "sanitizer $tool" "not found" >>"$steps"
    else
      gpu_tests "sanitizer $tool" 25 -E "$KERNELS" "$sanitizer" --tool "$tool" \
        --error-exitcode 9 --target-processes all
    fi
  done
fi
for bench in permute combine moe_layer grouped_gemm replica_sync; do
  rm -f "$OUT/bench_$bench.json"
done
# Results are written as they come; no new group begins after --budget seconds.
if built; then
  step "bench_replica_sync" 40 "$PYTHON" perf/bench_replica_sync.py --ranks 8 --budget 25 \
    --rounds 5 --json "$OUT/bench_replica_sync.json"
else
  printf '%-28s %-22s\n' "bench_replica_sync" "left out (not built)" >>"$steps"
fi
step "bench_moe_layer" 55 "$PYTHON" perf/bench_moe_layer.py --budget 40 \
  --json "$OUT/bench_moe_layer.json"
step "bench_grouped_gemm" 45 "$PYTHON" perf/bench_grouped_gemm.py --budget 30 \
  --json "$OUT/bench_grouped_gemm.json"
for bench in combine permute; do
  step "bench_$bench" 22 "$PYTHON" "perf/bench_$bench.py" --json "$OUT/bench_$bench.json"
done

echo
"$PYTHON" perf/gpu_table.py "$OUT"
! grep -q -e FAIL -e 'NOT RUN' "$steps"

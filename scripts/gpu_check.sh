#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves the GPU path on this machine: kernels, driver calls, two processes, compute-sanitizer, figures, the real server.
# Needs one CUDA GPU, torch, Triton, cuda-python, numpy and pytest, and the native core; fetches nothing.
#   PYTHON=...         interpreter (default: .venv, else python3)
#   OUT_DIR=...        results (default: build/gpu)
#   MODEL_PATH=...     a model for the server step; without one, or without SGLang, the step is named as not done
#   STEPS="tests ..."  choose among: tests sanitize bench server
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
OUT_DIR=${OUT_DIR:-build/gpu}
STEPS=${STEPS:-tests sanitize bench server}
export PYTHONPATH="$PWD:$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT_DIR"
failed=() not_done=()
step() { case " $STEPS " in *" $1 "*) printf '[gpu-check] %s ...\n' "$1" ;; *) return 1 ;; esac; }

"$PYTHON" - >"$OUT_DIR/facts.txt" 2>&1 <<'P' || { cat "$OUT_DIR/facts.txt"; exit 1; }
import platform, sys
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu-check: {error}")
if not torch.cuda.is_available():
    sys.exit("gpu-check: no CUDA GPU on this machine")
import triton
import banyan
from banyan import _native
from cuda.bindings import driver
gpu = torch.cuda.get_device_properties(0)
print(f"banyan {banyan.__version__}, Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}")
print(f"{gpu.name}, {gpu.multi_processor_count} SMs, {gpu.total_memory >> 30} GiB, driver {driver.cuInit(0) and driver.cuDriverGetVersion()[1]}")
P
cat "$OUT_DIR/facts.txt"

if step tests; then
    timeout 420 "$PYTHON" -m pytest test/gpu -q -p no:cacheprovider --junitxml="$OUT_DIR/tests.xml" 2>&1 | tee "$OUT_DIR/tests.txt" || failed+=(tests)
fi
if step sanitize; then
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            timeout 180 compute-sanitizer --tool "$tool" --error-exitcode 1 "$PYTHON" -m pytest test/gpu/test_kernel.py \
                -q -p no:cacheprovider -k "fp8 or odd or aligned" >"$OUT_DIR/$tool.txt" 2>&1 || failed+=("$tool")
            tail -n 2 "$OUT_DIR/$tool.txt"
        done
    else
        not_done+=("sanitize: no compute-sanitizer")
    fi
fi
if step bench; then
    timeout 420 "$PYTHON" -m banyan.cli bench gpu --json >"$OUT_DIR/bench.json" || failed+=(bench)
fi
if step server; then
    if [ -n "${MODEL_PATH:-}" ] && "$PYTHON" -c 'import sglang' 2>/dev/null; then
        timeout 600 "$PYTHON" test/gpu/server_check.py --model-path "$MODEL_PATH" --log "$OUT_DIR" | tee "$OUT_DIR/server.json" || failed+=(server)
    else
        not_done+=("server: needs SGLang and MODEL_PATH")
    fi
fi
[ ${#not_done[@]} -eq 0 ] || printf '[gpu-check] not done: %s\n' "${not_done[@]}"
if [ ${#failed[@]} -gt 0 ]; then
    printf '[gpu-check] FAILED: %s (see %s)\n' "${failed[*]}" "$OUT_DIR"
    exit 1
fi
echo "[gpu-check] passed; results in $OUT_DIR"

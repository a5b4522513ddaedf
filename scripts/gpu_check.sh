#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves the GPU path on this machine in steps of eight minutes at most; see test/gpu/check.py. Fetches nothing.
#   scripts/gpu_check.sh [STEP ...]   steps to run (again); without any: all that are not proved for this commit
#   PYTHON=...                        interpreter (default: .venv, else python3)
#   JOBS=6                            steps that run at once, on a GPU and a host that hold them (default: 1)
#   OUT_DIR=...                       results (default: build/gpu)
#   CUDA_STAND_IN=late                no GPU, but what stands in for one (test/cuda_stand_in)
#   SERVER_OPTIONS=...                added to the arguments of each server, as its last
#   MODEL_PATH=... MLA_MODEL_PATH=... DSA_MODEL_PATH=... WINDOW_MODEL_PATH=... STATE_MODEL_PATH=... MTP_MODEL_PATH=... DRAFT_MODEL_PATH=...
#                                     models for the server; steps without theirs are named as not possible
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
[ -e python/banyan/_native.abi3.so ] || "$PYTHON" -c 'import banyan._native' 2>/dev/null || {
    echo "gpu-check: run make setup first (docs/gpu.md)" >&2
    exit 1
}
export PYTHONPATH="$PWD:$PWD/python:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${CUDA_STAND_IN:-}" ]; then
    # The check of this check: torch computes, kernels are interpreted, nothing is captured.
    export PYTHONPATH="$PWD/test/cuda_stand_in:$PYTHONPATH" SGLANG_USE_CPU_ENGINE=0 OMP_NUM_THREADS=1
    export SGLANG_FORCE_FUSED_OP_BACKEND=torch SGLANG_ENABLE_JIT_DEEPGEMM=0 SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
    export SERVER_OPTIONS="--dtype float32 --attention-backend torch_native --cuda-graph-backend-decode disabled
        --cuda-graph-backend-prefill disabled --context-length 4096 --max-total-tokens 16384"
fi
exec "$PYTHON" test/gpu/check.py "$@"

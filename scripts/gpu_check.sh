#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves the GPU path on this machine in steps of eight minutes at most; see test/gpu/check.py. Fetches nothing.
#   scripts/gpu_check.sh [STEP ...]   steps to run (again); without any: all that are not proved for this commit
#   PYTHON=...                        interpreter (default: .venv, else python3)
#   OUT_DIR=...                       results (default: build/gpu)
#   MODEL_PATH=... MLA_MODEL_PATH=... DSA_MODEL_PATH=... WINDOW_MODEL_PATH=... DRAFT_MODEL_PATH=...
#                                     models for the server; steps without theirs are named as not possible
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
export PYTHONPATH="$PWD:$PWD/python:$PWD/lab${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" test/gpu/check.py "$@"

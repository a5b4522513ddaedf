#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves Banyan's GPU path on this machine, with what is packed behind this script; fetches nothing.
#   bash THIS_FILE [STEP ...]    `first`: the steps that tell within ten minutes whether the rest is worth it
#   FOLDER=...                   where it is unpacked (default: banyan-gpu-check, here)
#   PYTHON=...                   an interpreter with SGLang (default: python3)
#   MODEL_PATH=... and others    models of your own, as scripts/gpu_check.sh says; tiny ones are packed
set -euo pipefail
file=$(realpath "$0")
folder=$(realpath -m "${FOLDER:-banyan-gpu-check}")
export PYTHON=${PYTHON:-$(command -v python3)}
mkdir -p "$folder"
line=$(awk '/^__ARCHIVE__$/ { print NR + 1; exit }' "$file")
cd "$folder"
# An older bundle's files go first: a test or a patch that is gone would still be found. Results are not among them.
[ ! -f .unpacked ] || xargs -d '\n' rm -f -- <.unpacked
tail -n "+$line" "$file" | tar -xzvf - --quoting-style=literal >.unpacked
models=$PWD/build/models/tiny
export MODEL_PATH=${MODEL_PATH:-$models/wide} MLA_MODEL_PATH=${MLA_MODEL_PATH:-$models/mla-wide}
export DSA_MODEL_PATH=${DSA_MODEL_PATH:-$models/dsa} WINDOW_MODEL_PATH=${WINDOW_MODEL_PATH:-$models/sinks}
export MTP_MODEL_PATH=${MTP_MODEL_PATH:-$models/mla-wide-mtp} STATE_MODEL_PATH=${STATE_MODEL_PATH:-$models/state}
# A package that this machine has is not covered by the one that came along.
missing=$("$PYTHON" - site/* <<'PYTHON'
import importlib.metadata
import sys
from pathlib import Path

def is_missing(folder):
    try:
        importlib.metadata.distribution(folder.name)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False

print(":".join(str(folder.resolve()) for folder in map(Path, sys.argv[1:]) if is_missing(folder)))
PYTHON
)
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$missing" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
printf '[gpu-bundle] %s in %s; added: %s\n' "$(cat COMMIT)" "$folder" "${missing:-nothing}"
exec scripts/gpu_check.sh "$@"
__ARCHIVE__

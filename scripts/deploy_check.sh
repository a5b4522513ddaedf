#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What of deploy/ this machine can try: the renderings of the chart at a real API server, its containers in a runtime.
# What it cannot try is named in one line each. scripts/kubernetes.sh and scripts/deploy_image.sh make what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
inside=()
if [ "$(id -u)" = 0 ] && unshare --net --mount true 2>/dev/null; then
    # Networks, mounts and processes of pods go with it.
    inside=(unshare --net --pid --fork --kill-child --mount --mount-proc --propagation private)
fi
[ -e build/models/tiny/llama ] || PYTHONPATH=.:python .venv/bin/python -c 'from benchmark.modes.models import LLAMA, ensure; ensure(LLAMA)'
[ ${#inside[@]} -eq 0 ] || inside+=(sh -c 'ip link set lo up; exec "$@"' inside)
exec "${inside[@]}" env PYTHONPATH=.:python:lab:cpu_engine .venv/bin/python -m pytest -p no:cacheprovider -rs -v \
    --timeout=3000 "${@:-test/deploy}"

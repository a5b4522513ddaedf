#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two ranks on the CPU, for your own use; says what to type when they answer. `make serve ARGS='--port 30001'` adds
# arguments of SGLang or Banyan.
set -euo pipefail
cd "$(dirname "$0")/.."

# Of a type that this processor multiplies at a fair speed.
engine=$(.venv/bin/python -c "from benchmark.processor import CPU_ENGINE; print(*CPU_ENGINE)")

port=30000
words=("$@")
for at in "${!words[@]}"; do
    case ${words[$at]} in
    --port) port=${words[$((at + 1))]} ;;
    --port=*) port=${words[$at]#--port=} ;;
    esac
done

.venv/bin/python -c "import socket; socket.create_server(('127.0.0.1', $port))" 2>/dev/null || {
    printf '[serve] something listens on port %s: make serve ARGS="--port 30001"\n' "$port" >&2
    exit 1
}

answers() {
    .venv/bin/python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null
}
# The server takes this shell's place below, and its number; so this loop ends with it.
(
    waited=0
    while kill -0 $$ 2>/dev/null; do
        if answers; then
            printf '\n[serve] it answers. In another terminal:\n\n'
            printf "    curl http://127.0.0.1:%s/v1/chat/completions -H 'Content-Type: application/json' \\\\\n" "$port"
            printf "        -d '{\"model\": \"default\", \"messages\": [{\"role\": \"user\", \"content\": \"Say hello.\"}]}'\n\n"
            exit
        fi
        sleep 2
        waited=$((waited + 2))
        [ $((waited % 20)) -ne 0 ] || printf '[serve] starting, %s s; imports and weights take a minute or two\n' "$waited"
    done
) &

# With AMX the tokens of a prompt can depend on what was cached: docs/design/0003.
exec env SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND="0|1" OMP_NUM_THREADS=1 \
    ONEDNN_MAX_CPU_ISA="${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}" .venv/bin/python -m sglang.launch_server \
    --model-path "${MODEL:-build/models/smollm2-135m-instruct}" $engine --dp 2 --max-total-tokens 40000 \
    --context-length 8192 --sleep-on-idle --enable-banyan "$@"

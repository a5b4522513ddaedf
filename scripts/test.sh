#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All tests, those of servers with the mark `further` only with --all: an hour more. What keeps one core busy runs in two
# halves at the same time; servers have the machine for themselves, two modules of tests at a time where memory does for
# both.
set -uo pipefail
cd "$(dirname "$0")/.."

PY=.venv/bin/python
servers="not further"
[ "${1:-}" = --all ] && servers=""
mkdir -p build
# pytest ends by itself on Ctrl-C, and a shell without this would go on to the next one.
trap 'exit 130' INT
{
    trap 'exit 130' INT
    # Threads and forks of foreign libraries, Mooncake's among them, are not for the process of the other tests.
    "$PY" -m pytest test/native
    native=$?
    "$PY" -m pytest test/tidy test/unit test/property test/lab
    exit $((native | $?))
} >build/test.txt 2>&1 &
half=$!
echo "the other half at the same time: build/test.txt"
"$PY" -m pytest test/kernels test/sglang_plugin test/cpu_engine test/page
other=$?
wait $half
one=$?
cat build/test.txt
streams=$(awk '/^MemAvailable:/ { print ($2 > 18 * 2^20) ? 2 : 0 }' /proc/meminfo)
"$PY" -m pytest test/e2e -m "$servers" -v -n "$streams" --dist loadfile --no-loadscope-reorder
exit $((one | other | $?))

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels for `pip install` beside an SGLang of your own: scripts/wheel.sh [FOLDER].
# Banyan's needs no other. Beside it, in plain Python: that of banyan-cpu-engine, for machines without a
# GPU, and that of banyan-lab, which measures and simulates.
# Banyan's serves every Python from 3.11 on (abi3). It is linked by zig for glibc 2.28 and later; with WHEEL=here, for
# the glibc of this machine and later, which needs nothing and uses what setup has compiled. maturin refuses to write a
# tag that the library does not keep. TARGET=aarch64-unknown-linux-gnu builds the wheel for Arm hosts (rustup target add
# TARGET first); with WHEEL=here it is linked by aarch64-linux-gnu-gcc, for the glibc that belongs to it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/dist}
export PATH="$PWD/.venv/bin:$PATH"
say() { printf '[wheel] %s\n' "$*"; }

linking=()
if [ "${WHEEL:-portable}" = portable ]; then
    python -m ziglang version >/dev/null 2>&1 || {
        say "installing a linker for older glibc (requirements/release.txt) ..."
        uv pip install -q --no-deps -r requirements/release.txt
    }
    linking=(--zig --compatibility manylinux_2_28)
fi
target=()
if [ -n "${TARGET:-}" ]; then
    target=(--target "$TARGET")
    machine=${TARGET%%-*}
    # The linker's name in cargo's words: CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER.
    variable=CARGO_TARGET_$(printf %s "$TARGET" | tr 'a-z-' 'A-Z_')_LINKER
    [ ${#linking[@]} -gt 0 ] || export "$variable=${!variable:-$machine-linux-gnu-gcc}"
fi
say "building the wheel; the first time the native core is compiled, which takes minutes ..."
maturin build -q --release --strip --out "$out" ${linking[@]+"${linking[@]}"} ${target[@]+"${target[@]}"}
wheel=$(ls -t "$out"/banyan-*.whl | head -1)
if command -v auditwheel >/dev/null; then auditwheel show "$wheel" | grep -A1 consistent | sed 's/^/[wheel]   /'; fi
for beside in cpu_engine lab; do
    uv build -q --wheel --no-build-isolation --out-dir "$out" "./$beside"
done
say "$wheel; beside it $(cd "$out" && ls banyan_*.whl | tr '\n' ' ')"

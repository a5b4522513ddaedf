#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the native core for Arm hosts and runs its tests in an emulator: scripts/arm.sh [TEST ...].
# Needs: rustup target add aarch64-unknown-linux-gnu; gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user-static.
set -euo pipefail
cd "$(dirname "$0")/../sgl-kernel"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target/arm}
for tool in aarch64-linux-gnu-gcc qemu-aarch64-static; do
    command -v $tool >/dev/null || { printf '[arm] missing: %s\n' $tool; exit 1; }
done
# The emulator takes madvise(MADV_POPULATE_WRITE) and does nothing; what it translates counts as memory that grows.
skipped=(--skip reserved_memory_when_backed_in_parts --skip churn_when_it_goes_on)
cargo build --target aarch64-unknown-linux-gnu -p banyan-py
cargo test --no-fail-fast --target aarch64-unknown-linux-gnu -p banyan-shm -p banyan-store -- "${skipped[@]}" "$@"

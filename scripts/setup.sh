#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv: the locked packages, the stand-in for sgl_kernel, Banyan with its native core, the distributions beside
# it, and the demo's model.
# Does nothing where nothing has changed. Needs python3.11 (PYTHON=... to choose one), a C++ compiler, the
# headers of OpenSSL and cargo.
set -euo pipefail
cd "$(dirname "$0")/.."
# Also where a step that has heard Ctrl-C, too, says no more than that it failed.
trap 'exit 130' INT

PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
UV_VERSION=0.13.8
STAMPS=build/setup
say() { printf '[setup] %s\n' "$*"; }

missing=()
[ "$(uname -s)" = Linux ] || missing+=("Linux, and this is $(uname -s)")
# Elsewhere SGLang asks for other packages than the locked ones.
[ "$(uname -m)" = x86_64 ] || missing+=("an x86-64 processor, and this is $(uname -m)")
[ -n "$PYTHON" ] && "$PYTHON" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
    missing+=("python3.11 with venv (set PYTHON=/path/to/python3.11; \`uv python install 3.11\` brings one)")
command -v cc >/dev/null || missing+=("a C compiler (cc)")
# SGLang compiles its page hash on the machine that it serves on.
command -v c++ >/dev/null || missing+=("a C++ compiler (c++)")
echo '#include <openssl/sha.h>' | c++ -E -x c++ - >/dev/null 2>&1 || missing+=("headers of OpenSSL (libssl-dev, openssl-devel)")
wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' sgl-kernel/Cargo.toml)
found=$(rustc --version 2>/dev/null | cut -d' ' -f2 || true)
command -v cargo >/dev/null && printf '%s\n' "$wanted" "${found:-0}" | sort -VC ||
    missing+=("cargo with Rust $wanted or later, found ${found:-none} (rustup.rs; that of distributions is often older)")
if [ ${#missing[@]} -gt 0 ]; then
    printf 'setup: missing:'
    printf ' %s;' "${missing[@]}"
    printf '\n'
    exit 1
fi

mkdir -p "$STAMPS"
# A step runs again when the content of what it depends on has changed.
digest() { cat "$@" 2>/dev/null | sha256sum | cut -d' ' -f1; }
is_done() { [ -f "$STAMPS/$1" ] && [ "$(cat "$STAMPS/$1")" = "$2" ]; }
mark() { echo "$2" >"$STAMPS/$1"; }
# Long steps say every HEARTBEAT_S that they are still at work.
HEARTBEAT_S=20
timed() {
    local started=$SECONDS status=0
    say "$1 ..."
    shift
    (
        while sleep $HEARTBEAT_S </dev/null >/dev/null 2>&1; do
            say "    at it for $((SECONDS - started)) s; .venv holds $(du -sh .venv 2>/dev/null | cut -f1)"
        done
    ) &
    local clock=$!
    trap "kill $clock" EXIT
    # In the foreground: a program that the shell starts beside itself does not hear Ctrl-C.
    "$@" || status=$?
    trap - EXIT
    kill $clock
    [ $status = 0 ] || return $status
    say "    $((SECONDS - started)) s"
}

if [ ! -x .venv/bin/uv ]; then
    rm -f "$STAMPS"/*
    timed "creating .venv" "$PYTHON" -m venv .venv
    timed "installing uv $UV_VERSION" .venv/bin/python -m pip install -q --disable-pip-version-check "uv==$UV_VERSION"
fi
export UV_PYTHON=.venv/bin/python UV_LINK_MODE=${UV_LINK_MODE:-hardlink}

packages=$(digest requirements/cpu.lock)
if ! is_done packages "$packages"; then
    timed "installing $(wc -l <requirements/cpu.lock) locked packages (about 10 GB unpacked, torch among them)" \
        .venv/bin/uv pip install -q --no-deps -r requirements/cpu.lock
    mark packages "$packages"
fi

beside_sglang=(requirements/store.txt requirements/alternatives.txt requirements/clients.txt requirements/ray.txt)
others=$(digest "${beside_sglang[@]}")
if ! is_done others "$others"; then
    timed "installing other stores, SGLang's router, clients and Ray, to compare and test with" \
        .venv/bin/uv pip install -q --no-deps "${beside_sglang[@]/#/-r}"
    mark others "$others"
fi

# The tests of the page want a browser, those of the alert rules promtool, Mooncake's library the one of InfiniBand.
# Nothing that serves does, without a mooncake:// store.
wanted=() # what one tool needs, for each
# Read whole: who stops listening ends ldconfig, and the pipe counts as failed.
libraries=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null || true)
[[ $libraries == *libibverbs.so.1* ]] || wanted+=(libibverbs1)
command -v chromium >/dev/null || command -v google-chrome >/dev/null || wanted+=("chromium fonts-dejavu-core")
if ! command -v promtool >/dev/null; then
    # Where systemd runs, Debian starts what it installs.
    if [ -d /run/systemd/system ]; then
        say "not here: promtool; its tests will fail. Debian's package prometheus has it, and starts a Prometheus"
    else
        wanted+=(prometheus)
    fi
fi
if [ ${#wanted[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        install() {
            apt-get update -qq &&
                DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
        }
        for names in "${wanted[@]}"; do
            is_done "apt-${names%% *}" failed && continue
            timed "installing $names (for tests only)" install $names && continue
            say "    failed: its tests will fail; before trying again: rm $STAMPS/apt-${names%% *}"
            mark "apt-${names%% *}" failed
        done
    else
        say "not here: ${wanted[*]}; their tests will fail. Debian: apt-get install ${wanted[*]}"
    fi
fi

site=$(digest requirements/site.txt)
if ! is_done site "$site"; then
    timed "installing what makes the documentation site" .venv/bin/uv pip install -q --no-deps -r requirements/site.txt
    mark site "$site"
fi

# Installers leave bytecode to the first import, and where PYTHONDONTWRITEBYTECODE is set no import writes any: each of a
# server's five processes would then compile thousands of files. A few files are of other versions of Python, and fail.
compiled=$(digest requirements/cpu.lock "${beside_sglang[@]}")
compile_packages() { .venv/bin/python -m compileall -q -j 0 -x '/tests?/' .venv/lib/python3.11/site-packages >/dev/null || true; }
if ! is_done compiled "$compiled"; then
    timed "compiling the packages to bytecode" compile_packages
    mark compiled "$compiled"
fi

stand_in=$(digest cpu_engine/sgl_kernel_cpu/pyproject.toml cpu_engine/sgl_kernel_cpu/sgl_kernel/*.py)
if [[ $libraries != *libcuda.so.1* ]] && ! is_done stand_in "$stand_in"; then
    timed "no CUDA driver: installing the CPU stand-in for sgl_kernel" \
        .venv/bin/uv pip install -q --no-deps --no-build-isolation --reinstall ./cpu_engine/sgl_kernel_cpu
    mark stand_in "$stand_in"
fi

native=$(digest pyproject.toml sgl-kernel/Cargo.toml sgl-kernel/Cargo.lock $(find sgl-kernel/crates -name '*.rs' -o -name Cargo.toml | sort))
if ! is_done native "$native" || [ ! -e python/banyan/_native.abi3.so ]; then
    timed "building the native core" \
        env PATH="$PWD/.venv/bin:$PATH" .venv/bin/uv pip install -q --no-deps --no-build-isolation -e . \
        --config-settings "build-args=--features pyo3/extension-module,ceiling"
    mark native "$native"
fi

# They are found by their entry points, so they are installed, too; their code is taken from here.
beside=$(digest cpu_engine/pyproject.toml lab/pyproject.toml)
if ! is_done beside "$beside"; then
    timed "installing the CPU engine and the laboratory" \
        .venv/bin/uv pip install -q --no-deps --no-build-isolation -e ./cpu_engine -e ./lab
    mark beside "$beside"
fi

if [ ! -f build/models/smollm2-135m-instruct/banyan-model.json ]; then
    timed "unpacking SmolLM2-135M-Instruct to bf16" .venv/bin/python -m benchmark.model
fi
say "ready"

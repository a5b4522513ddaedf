#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds deploy/docker/cpu.Dockerfile without a daemon and without a registry of images, for `make deploy-check`: in place
# of the two images that it begins from stands a tree of Debian's packages, with this machine's Rust. Leaves the image in
# build/deploy/storage, mounted, and build/deploy/image.json. Needs root, buildah and mmdebstrap (apt-get install), and
# 30 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in buildah mmdebstrap rustc jq; do
    command -v $tool >/dev/null || { echo "deploy-image: $tool is not installed" >&2; exit 1; }
done
out=$PWD/build/deploy
mkdir -p "$out"
in_store() { buildah --root "$out/storage" --runroot "$out/run" --storage-driver overlay "$@"; }
# A package index may have a certificate that this machine knows and others do not.
certificates=/etc/ssl/certs
bundle=$certificates/ca-certificates.crt
bases=(rust:1.90-slim-bookworm python:3.11-slim-bookworm)

if ! in_store inspect --type image "docker.io/library/${bases[1]}" >/dev/null 2>&1; then
    # What those images have and Debian's smallest tree has not.
    packages=ca-certificates,passwd,gcc,libc6-dev,python3,libpython3-dev,python3-pip,python3-venv,python-is-python3
    mmdebstrap --quiet --variant=apt --include=$packages \
        --customize-hook='rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' bookworm "$out/base.tar"
    container=$(in_store from scratch)
    in_store add --quiet "$container" "$out/base.tar" /
    rm "$out/base.tar"
    in_store config --env PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        --env SSL_CERT_FILE=$bundle --env CARGO_HTTP_CAINFO=$bundle "$container"
    for base in "${bases[@]}"; do
        in_store commit --quiet "$container" "docker.io/library/$base"
    done
    in_store rm "$container" >/dev/null
fi
in_store bud --pull-never --isolation chroot --layers --volume "$certificates:$certificates:ro" \
    --volume "$(rustc --print sysroot):/usr/local/rust:ro" --file deploy/docker/cpu.Dockerfile --tag localhost/banyan:cpu .
container=$(in_store from --pull-never localhost/banyan:cpu)
root=$(in_store mount "$container")
in_store inspect --type image localhost/banyan:cpu |
    jq --arg root "$root" '.OCIv1.config | {root: $root, entrypoint: .Entrypoint, env: .Env, user: (.User // "0")}' \
        >"$out/image.json"
cat "$out/image.json"

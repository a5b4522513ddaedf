#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds Kubernetes' API server, its controllers and etcd from their Go modules into build/kubernetes, for
# `make deploy-check`. Needs Go 1.26; minutes, and 4 GB in Go's caches.
set -euo pipefail
cd "$(dirname "$0")/.."
VERSION=1.36.3
out=$PWD/build/kubernetes
command -v go >/dev/null || { echo "kubernetes: go is not installed" >&2; exit 1; }
mkdir -p "$out/module"
cd "$out/module"
export GOFLAGS="-mod=mod -buildvcs=false ${GOFLAGS:-}"

# A module of Kubernetes names its parts by places in its own repository; here they are the published ones.
rm -f go.mod go.sum
go mod init local >/dev/null 2>&1
file=$(go mod download -json "k8s.io/kubernetes@v$VERSION" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
{
    echo "replace ("
    sed -n "s,^\t\(k8s.io/[^ ]*\) => ./staging.*,\t\1 => \1 v0.${VERSION#*.},p" "$file"
    echo ")"
} >>go.mod
go get "k8s.io/kubernetes@v$VERSION"
go build -o "$out/etcd" go.etcd.io/etcd/server/v3
for name in kube-apiserver kube-controller-manager; do
    go build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=v$VERSION" -o "$out/$name" \
        "k8s.io/kubernetes/cmd/$name"
done
"$out/kube-apiserver" --version
"$out/etcd" --version | head -1

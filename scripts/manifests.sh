#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Renders deploy/helm/banyan with its defaults into deploy/kubernetes/banyan.yaml. A test compares the digest in its first
# line with the chart. Needs helm 3 (`go install helm.sh/helm/v3/cmd/helm@v3.21.0`).
set -euo pipefail
cd "$(dirname "$0")/.."
chart=deploy/helm/banyan
out=deploy/kubernetes/banyan.yaml
command -v helm >/dev/null || { echo "manifests: helm is not installed" >&2; exit 1; }

helm lint --strict "$chart"
rendered=$(helm template banyan "$chart" --kube-version 1.31)
digest=$(find "$chart" -type f | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-16)
printf '# The chart in deploy/helm/banyan with its defaults, by `make manifests`. Chart: %s\n%s\n' "$digest" "$rendered" >"$out"
for values in '' 'router.enabled=false' 'store.enabled=false' 'store.hostPath=' 'lockMemory=false,nodes=3' \
    'events.enabled=true' 'networkPolicy.enabled=false' 'router.enabled=false,networkPolicy.ingress[0].ports[0].port=30000' \
    'server.listen=0.0.0.0:7400,server.secretName=nodes' 'keptArena.hostPath=/dev/shm/banyan' 'router.image=banyan:cpu,router.nodeSelector.kind=small,router.tolerations[0].operator=Exists'; do
    helm template banyan "$chart" --kube-version 1.31 ${values:+--set "$values"} >build/rendered.yaml
    .venv/bin/kubernetes-validate --quiet --strict --kubernetes-version 1.35 build/rendered.yaml
done
echo "$out"

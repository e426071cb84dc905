#!/bin/bash
# `make image`: builds with docker, or with buildah if docker is not available. Arguments are passed to it.
#
#     IMAGE=gpt2_ddp       the image's name
#     BASE=localhost/debian:bookworm-slim    another base; docker/base.sh builds this one without an image registry
set -euo pipefail
cd "$(dirname "$0")/.."
secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT

# pip's settings on this machine (index, wheels, trusted hosts) as one file, the files that they name, and the certificate
mkdir "$secrets/files"
"${PYTHON:-python3}" docker/pip_settings.py "$secrets/pip" "$secrets/files"
ca=$("${PYTHON:-python3}" -m pip config list | sed -nE "s/^(:env:|global|install)\.cert='(.*)'$/\2/p" | head -n 1)
cat ${ca:+"$ca"} </dev/null >"$secrets/ca"

if docker info >/dev/null 2>&1; then
    build=(docker build)
else
    build=(buildah bud --layers --format docker)  # docker's format: the default one has no HEALTHCHECK
fi
"${build[@]}" --tag "${IMAGE:-gpt2_ddp}" ${BASE:+--build-arg "BASE=$BASE"} \
    --build-arg "REVISION=$(git describe --always --dirty 2>/dev/null || echo unknown)" \
    --secret "id=pip,src=$secrets/pip" --secret "id=ca,src=$secrets/ca" --build-context "pip=$secrets/files" "$@" .

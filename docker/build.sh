#!/bin/bash
# `make image`: by docker, or by buildah where no docker answers. What follows are flags of theirs.
#
#     IMAGE=gpt2_ddp       the image's name
#     BASE=localhost/debian:bookworm-slim    another base; docker/base.sh makes this one where no registry answers
set -euo pipefail
cd "$(dirname "$0")/.."
secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT

# pip's settings on this machine (the index, where wheels are, whom to trust), as one file. What the environment says
# stands first in the list, and wins.
{
    echo "[global]"
    "${PYTHON:-python3}" -m pip config list | sed -nE "s/^(:env:|global|install)\.([a-z-]+)='(.*)'$/\2 = \3/p" |
        sed 's/\\n/ /g' | awk '!seen[$1]++' | sed 's|^cert = .*|cert = /run/secrets/ca|'
} >"$secrets/pip"
ca=$("${PYTHON:-python3}" -m pip config list | sed -nE "s/^(:env:|global|install)\.cert='(.*)'$/\2/p" | head -n 1)
cat ${ca:+"$ca"} </dev/null >"$secrets/ca"

if docker info >/dev/null 2>&1; then
    build=(docker build)
else
    build=(buildah bud --layers --format docker)  # docker's format, as the other one has no HEALTHCHECK
fi
"${build[@]}" --tag "${IMAGE:-gpt2_ddp}" ${BASE:+--build-arg "BASE=$BASE"} \
    --build-arg "REVISION=$(git describe --always --dirty 2>/dev/null || echo unknown)" \
    --secret "id=pip,src=$secrets/pip" --secret "id=ca,src=$secrets/ca" "$@" .

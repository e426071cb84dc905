#!/bin/bash
# A Debian base from Debian's package mirror alone, where no image registry answers: as root, with mmdebstrap.
#     docker/base.sh && BASE=localhost/debian:bookworm-slim make image
set -euo pipefail
container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT
mmdebstrap --quiet --variant=minbase bookworm "$(buildah mount "$container")"
rm -rf "$(buildah mount "$container")"/var/cache/apt/* "$(buildah mount "$container")"/var/lib/apt/lists/*
buildah config --cmd bash "$container"
buildah commit --quiet "$container" localhost/debian:bookworm-slim

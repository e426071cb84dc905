#!/bin/bash
# Builds a Debian base from Debian's package mirror, for machines without an image registry. Needs root and mmdebstrap.
#     docker/base.sh && BASE=localhost/debian:bookworm-slim make image
set -euo pipefail
container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT
mmdebstrap --quiet --variant=minbase bookworm "$(buildah mount "$container")"
rm -rf "$(buildah mount "$container")"/var/cache/apt/* "$(buildah mount "$container")"/var/lib/apt/lists/*
buildah config --cmd bash "$container"
buildah commit --quiet "$container" localhost/debian:bookworm-slim

#!/bin/bash
# PID 1 of the image: `health`, a script for `accelerate launch` (with its flags, if any), or any other command.
case "${1:-}" in
health) set -- docker/health.sh ;;
-* | *.py) set -- accelerate launch "$@" ;;
esac
exec "$(dirname "$0")/../cloud/launch.sh" "$@"

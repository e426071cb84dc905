#!/bin/bash
# PID 1 of the image: `health`, a script for `accelerate launch` (with its flags, if any), or any other command.
#
# `docker stop` sends SIGTERM here. A launcher that is signalled ends with a code of its own, or without its trainer; so
# its trainers are told, each saves and ends with 0, and then so does the launcher. What has no launcher ends with 75.
case "${1:-}" in
health) set -- docker/health.sh ;;
-* | *.py) set -- accelerate launch "$@" ;;
esac

stop() {
    local trainers=
    case "$1" in accelerate | torchrun | docker/health.sh) trainers=$(cat "/proc/$main/task/"*/children 2>/dev/null) ;; esac
    # unquoted: several of them. A launcher that has none yet has nothing to lose
    kill -TERM ${trainers:-$main} 2>/dev/null
}
trap 'signalled=1; stop "$1"' TERM INT
"$@" &
main=$!
wait "$main"
code=$?
while [ -n "${signalled:-}" ]; do  # which made `wait` return
    signalled=
    wait "$main"
    code=$?
done
exit "$code"

#!/bin/bash
# cloud/launch.sh COMMAND...: runs a launcher, or any other command, and exits with a code for the run's outcome:
#   0 completed; 75 stopped: start it again; 2 user error, 3 diverged: do not; other codes are the command's.
# Launchers exit with 0 after a stop and with 1 after any error. Therefore the ranks append their codes to a file.
#
# SIGTERM (`docker stop`, a preempted machine, a deleted pod) is sent to a launcher's ranks, every second until they have
# ended: the first one may come before the ranks exist. A signalled launcher would kill its ranks 30 s later, saved or not.
command -v "${1:-}" >/dev/null || { echo "error: command = ${1:-}: not found; cloud/launch.sh COMMAND..." >&2; exit 2; }
stopped= stopping= command=
GPT2_DDP_EXIT_CODES=$(mktemp)
export GPT2_DDP_EXIT_CODES

stop() {
    [[ $stopped && $command && ! $stopping ]] || return
    stopping=1
    stop_ranks "$@" >/dev/null 2>&1 &
}
stop_ranks() {
    trap '' TERM INT
    case " ${*##*/} " in
    *" accelerate "* | *" torchrun "* | *" health.sh "* | *" torch.distributed.run "* | *" accelerate.commands.launch "*) ;;
    *) kill -TERM "$command" && return ;;
    esac
    for ((idle = 5; ; idle++)); do  # seconds without ranks
        ranks=$(cat "/proc/$command/task/"*/children) || return
        [[ $ranks ]] && idle=0
        # Unquoted: several process ids. The launcher gets the signal before it has ranks, and 5 s after they have
        # ended: an elastic one would wait for the other machines' ranks, which continue.
        ((0 < idle && idle < 5)) || kill -TERM ${ranks:-$command}
        sleep 1
    done
}
trap 'stopped+=1; stop "$@"' TERM INT
"$@" &
command=$!
stop "$@"  # the signal may have come before
until
    before=$stopped
    wait "$command"
    code=$?
    [[ $before == "$stopped" ]]  # a signal may interrupt `wait`; the next call returns the command's code
do :; done

codes=$(cat "$GPT2_DDP_EXIT_CODES")
rm -f "$GPT2_DDP_EXIT_CODES"
if [[ $code == 0 ]]; then
    last=${codes##*$'\n'}  # a launcher may have restarted its ranks
    [[ $stopped ]] && exit "${last:-75}"
    exit "${last:-0}"
fi
for known in 2 3; do [[ $'\n'$codes$'\n' == *$'\n'$known$'\n'* ]] && exit $known; done
[[ $stopped ]] && exit 75
exit "$code"

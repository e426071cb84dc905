#!/bin/bash
# cloud/launch.sh RUN COMMAND...: runs a launcher and exits with a code for the run's outcome:
#   0 completed; 75 stopped: start it again; 3 diverged: do not start it again; other codes are the launcher's.
# With `-` for RUN, exits with the command's code: after a stop 0 with a launcher, 75 without one.
#
# With accelerate and torchrun, SIGTERM (`docker stop`, a preempted machine, a deleted pod) is sent only to the ranks. They
# save and end, then the launcher ends. A signalled launcher would kill its ranks 30 s later, saved or not.
run=$1 stopped=
stop() {
    stopped+=1
    local ranks=
    case "${1##*/} $* " in
    "accelerate "* | "torchrun "* | "health.sh "* | *" -m torch.distributed.run "* | *" -m accelerate.commands.launch "*)
        ranks=$(cat "/proc/$command/task/"*/children)
        ;;
    esac
    # unquoted: several process ids. Without ranks yet, the launcher gets the signal
    kill -TERM ${ranks:-$command}
    # an elastic launcher would wait for the other machines' ranks, which continue
    [[ $ranks ]] && (for rank in $ranks; do tail --pid="$rank" -f /dev/null; done; sleep 5; kill -TERM "$command") &
} 2>/dev/null
trap 'stop "${@:2}"' TERM INT  # before the command starts
"${@:2}" &
command=$!
[[ $stopped ]] && stop "${@:2}"
until
    before=$stopped
    wait "$command"
    code=$?
    [[ $before == "$stopped" ]]  # a signal may interrupt `wait`; the next call returns the command's code
do :; done
[[ $run == - ]] && exit "$code"

is() { grep -qs "\"state\": \"$1\"" "$run/status.json"; }
if [[ $code == 0 ]]; then
    is completed && exit 0
    [[ -f $run/status.json ]] && exit 75
    echo "error: $run: has no status.json; name the run folder of the command" >&2
    exit 2
fi
[[ $stopped ]] && exit 75
is diverged && exit 3
exit "$code"

#!/bin/bash
# cloud/launch.sh RUN COMMAND...: runs a launcher and ends with what its run came to, which launchers' codes do not say:
#   0 the run is complete, 75 it was stopped: start it again, 3 it has diverged: do not, else the launcher's own.
# With `-` for the run it ends as the command does: 0 after a stop under a launcher, 75 without one.
#
# SIGTERM (`docker stop`, a preempted machine, a deleted pod) goes to the ranks alone of accelerate and torchrun. All save
# and end by themselves, and so does the launcher; signalled itself, it kills its ranks 30 s later, saved or not.
run=$1 stopped=
stop() {
    stopped+=1
    local ranks=
    case "${1##*/} $* " in
    "accelerate "* | "torchrun "* | "health.sh "* | *" -m torch.distributed.run "* | *" -m accelerate.commands.launch "*)
        ranks=$(cat "/proc/$command/task/"*/children)
        ;;
    esac
    # unquoted: several of them. A launcher that has none yet has nothing to lose
    kill -TERM ${ranks:-$command}
    # an elastic launcher would wait for those of the other machines, which go on
    [[ $ranks ]] && (for rank in $ranks; do tail --pid="$rank" -f /dev/null; done; sleep 5; kill -TERM "$command") &
} 2>/dev/null
trap 'stop "${@:2}"' TERM INT  # before there is anything to stop
"${@:2}" &
command=$!
[[ $stopped ]] && stop "${@:2}"
until
    before=$stopped
    wait "$command"
    code=$?
    [[ $before == "$stopped" ]]  # or a signal may have made it return; again it says how the command has ended
do :; done
[[ $run == - ]] && exit "$code"

is() { grep -qs "\"state\": \"$1\"" "$run/status.json"; }
if [[ $code == 0 ]]; then
    is completed && exit 0
    [[ -f $run/status.json ]] && exit 75
    echo "error: $run: holds no status.json; name the folder of the run that was started" >&2
    exit 2
fi
[[ $stopped ]] && exit 75
is diverged && exit 3
exit "$code"

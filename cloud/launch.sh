#!/bin/bash
# cloud/launch.sh RUN COMMAND...: starts a launcher and ends with what its run came to, which launchers' codes do not say:
#   0 the run is complete, 75 it was stopped: start it again, 2 it has diverged: do not, else the launcher's own.
# SIGTERM (a preempted machine, a deleted pod) goes to this machine's ranks alone. All ranks save and end by themselves;
# a launcher that is signalled kills its ranks 30 s later, saved or not.
run=$1
"${@:2}" &
launcher=$!
stop() {
    stopped=1
    ranks=$(<"/proc/$launcher/task/$launcher/children")
    kill -TERM ${ranks:-$launcher}
} 2>/dev/null
trap stop TERM INT
while
    wait "$launcher"
    code=$?
    kill -0 "$launcher" 2>/dev/null
do :; done

is() { grep -qs "\"state\": \"$1\"" "$run/status.json"; }
if [[ $code == 0 ]]; then
    is completed && exit 0
    [[ -f $run/status.json ]] && exit 75
    echo "error: $run: holds no status.json; name the folder of the run that was started" >&2
    exit 2
fi
[[ $stopped ]] && exit 75
is diverged && exit 2
exit "$code"

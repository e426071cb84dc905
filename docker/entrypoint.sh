#!/bin/bash
# PID 1 of the image. `docker stop` sends SIGTERM here; a lone `accelerate launch` would not pass it on, and the
# container would be gone before the trainer has saved. So: tell everybody, and leave when the last one has.
trap 'kill -TERM -1' TERM INT
accelerate launch "$@" &
wait $!
code=$?
while kill -0 -1 2>/dev/null; do wait; sleep 0.2; done
exit "$code"

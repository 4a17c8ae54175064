#!/usr/bin/env bash
# The scaling table: strategies x GPU counts at one global batch.
#
#     ./bench.sh                                             # 6b on the GPUs that are here: 1, 2, 4, 8
#     MODEL=1b GPUS="1 4" STRATEGIES="ddp zero2" ./bench.sh  # some of it
#     MICRO="4 pipe=2" ./bench.sh --recompute full           # micro-batch of all, of one; flags go to every run
#     timeout 600 ./bench.sh                                 # the most important cells come first, the table is printed at the end
#
# A cell is a process of its own: 8 steps, the first 3 warm up, each timed with the GPU synchronised; at most LIMIT seconds.
# Figures are kept in docs/results/scaling-MODEL-BATCH-GPU.json, those with flags in a file of their own, and not measured again
# by a later call (delete the file to start over). Exit code 0 only when every cell has its figure and the losses agree.
# Without a GPU: model tiny over gloo, figures in runs/bench, and they mean nothing but that it works.
set -u
PYTHON=${PYTHON:-python3}
[[ $PYTHON == */* ]] && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
cd "$(dirname "$0")" || exit 2

strategy() { # a line per strategy; one whose script is not there is left out
    case $1 in
    single | ddp) echo train_ddp.py ;;
    zero[123]) echo train_zero.py --stage "${1#zero}" ;;
    zero2-offload) echo train_zero.py --stage 2 --offload optimizer ;;
    tp) echo train_tp.py ;;
    pipe) echo train_pipe.py ;;
    compute-only) echo support/bench_table.py compute-only ;;
    *) return 1 ;;
    esac
}
TIERS=("zero2 ddp zero3" "tp pipe" "zero1 zero2-offload") # most important first

facts=$("$PYTHON" -c 'import torch
n = torch.cuda.device_count()
print(n, torch.cuda.mem_get_info()[1] if n else 0, torch.cuda.get_device_name() if n else "cpu")') ||
    { echo "error: $PYTHON cannot import torch (PYTHON=... names another)" >&2; exit 2; }
read -r present card_bytes hardware <<<"$facts"
OUT=${OUT:-runs/bench}
if [ "$present" -gt 0 ]; then
    device=cuda MODEL=${MODEL:-6b} RESULTS=docs/results PICTURE=docs/scaling.png
    [ -z "${GPUS:-}" ] && for n in 1 2 4 8; do [ $n -le "$present" ] && GPUS="${GPUS:-} $n"; done
else
    device=cpu MODEL=${MODEL:-tiny} RESULTS=$OUT PICTURE=$OUT/scaling.png GPUS=${GPUS:-1 2}
    echo "no GPU: these figures mean nothing about speed, they only show that every cell runs"
fi
GLOBAL_BATCH=${GLOBAL_BATCH:-64} LIMIT=${LIMIT:-300} MICRO=${MICRO:-}
wanted=${STRATEGIES:-zero2 ddp zero3 tp pipe zero1 zero2-offload}
for name in $wanted; do
    strategy "$name" >/dev/null || { echo "error: STRATEGIES has $name; allowed are single ${TIERS[*]} compute-only" >&2; exit 2; }
done
for word in $MICRO; do
    [[ $word =~ ^([a-z0-9-]+=)?[1-9][0-9]*$ ]] && { [[ $word != *=* ]] || strategy "${word%%=*}" >/dev/null; } ||
        { echo "error: MICRO has $word; allowed are 4 or STRATEGY=4" >&2; exit 2; }
done
for n in $GPUS; do
    [[ $n =~ ^[1-9][0-9]*$ ]] || { echo "error: GPUS has $n; allowed are whole numbers, as in GPUS=\"1 2 4\"" >&2; exit 2; }
    [ $device = cpu ] || [ "$n" -le "$present" ] || { echo "error: GPUS has $n; there are $present" >&2; exit 2; }
done
mkdir -p "$RESULTS" "$OUT" || exit 2
model=$(basename "$MODEL" .json)
file=$RESULTS/scaling-$model-$GLOBAL_BATCH-$(tr 'A-Z ' 'a-z-' <<<"$hardware")${*:+-$(cksum <<<"$*" | cut -d' ' -f1)}.json
failed=0 child='' tried=''

finish() { # on every way out: what was measured so far is a table
    if [ -n "$child" ]; then kill "$child" 2>/dev/null && wait "$child"; fi
    echo
    "$PYTHON" -m support.bench_table table "$file" || failed=1
    [ -f "$file" ] && "$PYTHON" -m support.bench_table picture "$file" "$PICTURE" && echo "rows: $file, picture: $PICTURE"
    exit $failed
}
trap finish EXIT
trap 'echo "stopped by a signal: the cells below are kept"; failed=1; exit 1' TERM INT

limited() { # limited LOG COMMAND...: in the background, so that a signal to this script ends it too
    local log=$1 code
    shift
    timeout -k 45 "$LIMIT" "$@" >"$log" 2>&1 &
    child=$!
    wait "$child"
    code=$?
    child=
    return $code
}

reason() { grep -aE '^(rank [0-9]+: )?(error: |[A-Za-z_.]*(Error|Exception|Interrupt)\b)' "$1" | head -1 | cut -c1-200; } # the first error is the cause

cell() { # cell STRATEGY GPUS FLAGS...: one row of the file or one line that says why not; 0 when the figure is there
    local name=$1 n=$2 script launcher shown flags command out code word micro=''
    shift 2
    script=($(strategy "$name"))
    [ -f "${script[0]}" ] || { echo "left out  $name: there is no ${script[0]} here"; return 0; }
    [[ $tried == *" $name:$n "* ]] && return 0
    tried+=" $name:$n "
    launcher=("$PYTHON") shown=python
    [ "$n" -gt 1 ] && launcher+=(-m torch.distributed.run --standalone --nproc_per_node="$n") shown="torchrun --nproc_per_node=$n"
    for word in $MICRO; do
        case $word in "$name="*) micro=${word#*=} ;; *=*) ;; *) micro=${micro:-$word} ;; esac
    done
    flags=(--model "$MODEL" --global-batch "$GLOBAL_BATCH" ${micro:+--micro-batch "$micro"} --device $device --steps 8
        --eval-every 0 --save-every 0 --log-every 1 --lr 1e-5 "$@") # so small that the losses of all strategies stay together
    command="$shown ${script[*]} ${flags[*]}"
    "$PYTHON" -m support.bench_table has "$file" "$command" && { echo "kept      $name on $n"; return 0; }
    out=$OUT/$model-$name-$n
    rm -rf "$out"
    limited "$out.txt" "${launcher[@]}" "${script[@]}" "${flags[@]}" --out "$out"
    code=$?
    if [ $code -eq 0 ] && "$PYTHON" -m support.bench_table row "$file" "$name" "$n" "$out" "$command"; then
        echo "measured  $name on $n: $(grep -a '^step ' "$out.txt" | tail -1)"
        return 0
    fi
    failed=1
    if [ "$name" != compute-only ] && grep -qaiE 'out of memory|OutOfMemoryError' "$out.txt"; then
        limited "$out.explain.txt" "${launcher[@]}" "${script[@]}" "${flags[@]}" --explain
        echo "FAILED    $name on $n does not fit: $(awk -v card="$card_bytes" '/^memory of one rank, GB:/ {
            printf "%.1f GB predicted, the card has %.1f GB: %.1f GB too much", $NF, card / 1e9, $NF - card / 1e9 }' "$out.explain.txt")"
    elif [ $code -eq 124 ] || [ $code -eq 137 ]; then
        echo "FAILED    $name on $n: it took more than LIMIT=$LIMIT s (log: $out.txt)"
    else
        echo "FAILED    $name on $n: exit code $code: $(reason "$out.txt") (log: $out.txt)"
    fi
    return 1
}

if [[ " $GPUS " == *" 1 "* ]]; then # what efficiency is measured against comes first
    cell single 1 "$@" || wanted+=" compute-only"
    [[ " $wanted " == *" compute-only "* ]] && { cell compute-only 1 "$@"; cell zero2-offload 1 "$@"; }
fi
for tier in "${TIERS[@]}"; do
    for n in $(tr ' ' '\n' <<<"$GPUS" | sort -rnu); do
        for name in $tier; do
            [[ " $wanted " == *" $name "* ]] && { [ "$n" -gt 1 ] || [ "$name" = zero2-offload ]; } && cell "$name" "$n" "$@"
        done
    done
done

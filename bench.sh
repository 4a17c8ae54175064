#!/usr/bin/env bash
# The scaling table: strategies x GPU counts at one global batch.
#
#     ./bench.sh                                             # 6b on the GPUs that are here: 1, 2, 4, 8
#     MODEL=1b GPUS="1 4" STRATEGIES="ddp zero2" ./bench.sh  # some of it; GLOBAL_BATCH=64 sequences a step
#     MICRO="4 pipe=2" ./bench.sh --recompute full           # micro-batch of all, of one; flags go to every run
#     timeout 600 ./bench.sh                                 # the most important cells come first, the table at the end
#
# A cell is a process of its own: 8 steps, the first 3 warm up; at most LIMIT seconds. Figures are kept in
# docs/results/scaling-MODEL-BATCH-GPU.json, those with flags in a file of their own, and not measured again (delete
# the file to start over). Exit code 0 only if every cell has its figure and the losses agree. Without a GPU: model
# tiny over gloo, figures in runs/bench, which only show that it works.
set -u
PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-300}
[[ $PYTHON == */* ]] && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
cd "$(dirname "$0")" || exit 2
table() { "$PYTHON" -m support.bench_table "$@"; }
plan=$(table plan "$@") || exit 2
{ IFS=$'\t' read -r file picture logs; mapfile -t cells; } <<<"$plan"
failed=0 child='' alone=no

finish() { # on every way out: what was measured so far is a table
    if [ -n "$child" ]; then kill "$child" 2>/dev/null && wait "$child"; fi
    echo
    table table "$file" || failed=1
    [ -f "$file" ] && table picture "$file" "$picture" && echo "rows: $file, picture: $picture"
    exit $failed
}
trap finish EXIT
trap 'echo "stopped by a signal: the cells below are kept"; failed=1; exit 1' TERM INT

limited() { # limited LOG COMMAND...: in the background, so that a signal to this script ends it too
    timeout -k 45 "$LIMIT" "${@:2}" >"$1" 2>&1 &
    child=$!
    wait "$child"
    code=$? child=
}

cell() { # cell STRATEGY GPUS COMMAND: one row of the file, or one line that says why not
    local out=$logs-$1-$2 words
    eval "words=($3)" # quoted by shlex.join()
    words=("${words[@]:1}") # behind python or torchrun
    [ "$2" -gt 1 ] && words=(-m torch.distributed.run --standalone "${words[@]}")
    rm -rf "$out" "$out.txt.explain"
    limited "$out.txt" "$PYTHON" "${words[@]}" --out "$out"
    if [ $code -eq 0 ] && table row "$file" "$1" "$2" "$out" "$3"; then
        echo "measured  $1 on $2: $(grep -a '^step ' "$out.txt" | tail -1)"
        return 0
    fi
    grep -qaiE 'out of memory|OutOfMemoryError' "$out.txt" &&
        limited "$out.txt.explain" "$PYTHON" "${words[@]}" --explain
    echo "FAILED    $1 on $2: $(table why "$out.txt" $code "$LIMIT") (log: $out.txt)"
    failed=1
    return 1
}

for line in "${cells[@]}"; do
    IFS=$'\t' read -r action name gpus command <<<"$line"
    case $action in
    spare) [ $alone = no ] && cell "$name" "$gpus" "$command" ;; # the model does not fit one GPU
    run) cell "$name" "$gpus" "$command" && [ "$name" = single ] && alone=yes ;;
    kept) echo "kept      $name on $gpus" && [ "$name" = single ] && alone=yes ;;
    esac
done

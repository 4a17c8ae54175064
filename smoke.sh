#!/usr/bin/env bash
# Does it run here? The machine first, then every strategy: a few steps, save, resume, a few steps more.
#
#     ./smoke.sh                          # all train_*.py that are here; about two minutes on two CPU cores
#     ./smoke.sh my_script.py --flag      # one script of your own that takes the same flags
#     PYTHON=.venv/bin/python ./smoke.sh
#
# Two GPUs are used if there are two, else two CPU processes over gloo; train_3d.py needs four of either. No network and
# no corpus are needed. One line per check, ok or FAILED with the reason; exit code 1 if any failed. Logs stay in
# runs/smoke-DATE/.
set -u
PYTHON=${PYTHON:-python3}
[[ $PYTHON == */* ]] && PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
if [ $# -gt 0 ]; then
    [ -f "$1" ] || { echo "error: $1: no such script"; exit 2; }
    own=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
fi
cd "$(dirname "$0")" || exit 2
folder=runs/smoke-$(date +%Y%m%d-%H%M%S)-$$
mkdir -p "$folder" || exit 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
first=6 total=10 failed=0 firsts=()

ok() { printf 'ok      %s\n' "$*"; }
bad() { printf 'FAILED  %s\n' "$*"; failed=1; }
# the first error in a log, without torchrun's own summary of it
reason() {
    grep -aE '(^|[] :])([Ee]rror|[A-Za-z.]+(Error|Exception)): ' "$1" | grep -avE 'ChildFailedError|elastic' |
        head -1 | cut -c1-200
}
# launch RANKS SCRIPT FLAGS...; --standalone: a free port, so that two runs at once do not meet; -k: torchrun itself
# ends ranks that ignore the first signal, after 30 s
launch() { timeout -k 45 300 "$PYTHON" -m torch.distributed.run --standalone --nproc_per_node="$1" "${@:2}"; }

# --- the machine ---
facts=$(timeout 120 "$PYTHON" - 2>&1 <<'END'
import os, pathlib, shutil, socket, sys, torch, numpy, tiktoken
gpus = torch.cuda.device_count()
names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(gpus)}))
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, {gpus} GPUs {names}")
driver = pathlib.Path("/proc/driver/nvidia/version")
print("driver:", driver.read_text().splitlines()[0] if driver.exists() else "no NVIDIA driver, so gloo on CPUs")
page, pages = os.sysconf("SC_PAGE_SIZE"), [os.sysconf(f"SC_{what}PHYS_PAGES") for what in ("AV", "")]
cards = "".join("; card {} {:.1f} of {:.1f} GB free".format(i, *(n / 1e9 for n in torch.cuda.mem_get_info(i))) for i in range(gpus))
print("memory: {:.1f} of {:.1f} GB free on the host{}".format(*(page * n / 1e9 for n in pages), cards))
pairs = [(i, j) for i in range(gpus) for j in range(gpus) if i != j]
reach = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
print(f"links: {reach} of {len(pairs)} ordered pairs of cards read each other's memory" if pairs else "links: no two cards")
free = {place: shutil.disk_usage(place).free / 1e9 for place in (".", "/dev/shm")}
print("disk: " + ", ".join(f"{gb:.1f} GB free in {place}" for place, gb in free.items()))
if free["."] < 0.5 or free["/dev/shm"] < 0.05:
    sys.exit("too little room on the disk, or in /dev/shm (loader workers hand batches over there; --workers 0 does without)")
with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname(), 5):
    print(f"ports: localhost:{server.getsockname()[1]} was free and answered")
print("cuda" if gpus >= 2 else "cpu", gpus)
END
) || { bad "python and torch: $(tail -1 <<<"$facts")"; exit 1; }
read -r device gpus <<<"$(tail -1 <<<"$facts")"
while read -r line; do ok "$line"; done < <(head -n -1 <<<"$facts")
ok "tested on $device"

if launch 2 --no-python "$PYTHON" -c "
import os, sys, torch, torch.distributed as dist
device = torch.device('$device', int(os.environ['LOCAL_RANK'])) if '$device' == 'cuda' else torch.device('cpu')
dist.init_process_group('nccl' if '$device' == 'cuda' else 'gloo')
x = torch.full((1 << 20,), dist.get_rank() + 1.0, device=device)
dist.all_reduce(x)
assert (x == 3).all(), f'1 + 2 gave {x.min().item()} to {x.max().item()}'
dist.destroy_process_group()" >"$folder/all_reduce.txt" 2>&1; then
    ok "two processes all_reduce over $([ "$device" = cuda ] && echo nccl || echo gloo)"
else
    bad "two processes cannot all_reduce: $(reason "$folder/all_reduce.txt") (log: $folder/all_reduce.txt)"
    exit 1
fi

# --- the strategies ---
check() { # check RANKS NAME SCRIPT FLAGS...: one line
    local ranks=$1 name=$2 out=$folder/${2//[^A-Za-z0-9]/-} steps code verdict
    shift 2
    local flags=(--out "$out" --device "$device" --model tiny --seq-len 64 --global-batch 8 --lr 2e-3 --warmup-steps 2
        --dtype float32 --no-compile --eval-every 0 --save-every 1000 --workers 0)
    for steps in $first $total; do # the second run finds the first one's checkpoint and goes on from it
        launch "$ranks" "$@" "${flags[@]}" --steps "$steps" >>"$out.txt" 2>&1
        code=$?
        if [ $code -ne 0 ]; then
            [ $code -ge 124 ] && code="$code (124, 137: it took more than 300 s)"
            bad "$name: exit code $code with --steps $steps: $(reason "$out.txt") (log: $out.txt)"
            return
        fi
    done
    verdict=$("$PYTHON" - "$out" "$first" "$total" 2>&1 <<'END'
import json, math, pathlib, sys
out, first, total = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
if not all(math.isfinite(loss) for loss in losses):
    sys.exit(f"a loss is not finite: {losses}")
if steps != list(range(total)):
    sys.exit(f"steps {steps} in the log, expected 0 to {total - 1}, each once")
if f"at step {first}" not in pathlib.Path(f"{out}.txt").read_text():
    sys.exit(f"the second run did not go on from step {first}")
if sum(losses[-3:]) / 3 > losses[0] - 0.05:
    sys.exit(f"the loss does not fall: {losses}")
print(f"{losses[0]:.6f} {losses[-1]:.6f}")
END
    ) || { bad "$name: $(tail -1 <<<"$verdict") (log: $out.txt)"; return; }
    firsts+=("${verdict% *}")
    ok "$name: loss ${verdict/ / -> }, $first steps, saved, resumed to $total"
}

if [ $# -gt 0 ]; then
    shift
    check 2 "$(basename "$own")" "$own" "$@"
else
    for script in train_*.py; do
        case $script in
        train_zero.py) for stage in 1 2 3; do check 2 "$script --stage $stage" "$script" --stage $stage; done ;;
        train_3d.py)
            if [ "$device" = cpu ] || [ "$gpus" -ge 4 ]; then
                check 4 "$script" "$script" --tp 2 --pp 2
            else
                printf 'left out %s: it needs four GPUs, there are %s\n' "$script" "$gpus"
            fi ;;
        *) check 2 "$script" "$script" ;;
        esac
    done
fi
if [ ${#firsts[@]} -gt 1 ]; then
    spread=$(printf '%s\n' "${firsts[@]}" | sort -g | awk 'NR == 1 { low = $1 } END { printf "%.6f", $1 - low }')
    if awk "BEGIN { exit !($spread <= 1e-4) }"; then
        ok "${#firsts[@]} strategies, one first loss: they differ by $spread"
    else
        bad "the first losses differ by $spread, allowed is 0.0001: ${firsts[*]}"
    fi
fi
exit $failed

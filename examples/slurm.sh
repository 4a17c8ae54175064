#!/usr/bin/env bash
# Two hosts of eight GPUs under Slurm: sbatch examples/slurm.sh --model 6b --data DIR --out runs/6b
#
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1           # one torchrun on each host; it starts a process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@120             # two minutes before the time limit: save and stop (longer if a save takes longer)
#SBATCH --requeue                     # the same command goes on from the newest checkpoint
#
# The run folder must lie on a file system that all hosts share. Between hosts port PORT of the first one must be open,
# and whatever NCCL picks; NCCL_DEBUG=INFO prints which network it took (NET/IB: InfiniBand, NET/Socket: Ethernet).
set -eu
SCRIPT=${SCRIPT:-train_zero.py} PORT=${PORT:-29500}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}
exec srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv_backend=c10d --rdzv_endpoint="$head:$PORT" --rdzv_id="$SLURM_JOB_ID" "$SCRIPT" "$@"

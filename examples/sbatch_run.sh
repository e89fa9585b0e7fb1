#!/bin/bash
# sbatch ./sbatch_run.sh            one node
# sbatch -N 2 ./sbatch_run.sh       two; add --gpus-per-node=4 for four processes on each
#
# The same by hand that `launch=slurm` writes for you.
#SBATCH --job-name=multinode
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=/dev/null
mkdir -p logs
exec > "logs/$SLURM_JOB_ID.log" 2>&1

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export WORLD_SIZE=$SLURM_NNODES # nodes: each starts one process per GPU it sees
srun --ntasks-per-node=1 bash -c 'NODE_RANK=$SLURM_NODEID exec python multinode.py 10 5 launch=env'

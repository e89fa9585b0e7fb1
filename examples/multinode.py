"""Several machines, one agent on each, started by hand with its node rank:

torchrun --nproc_per_node 1 --nnodes 2 --node_rank 0 --rdzv_id 100 --rdzv_backend c10d \\
    --rdzv_endpoint HOST:9001 multinode.py

or all at once: sbatch -N 2 ./sbatch_run.sh
"""

import argparse
import os

from toy import experiment

import echelon

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int, nargs="?", default=10)
    parser.add_argument("save_every", type=int, nargs="?", default=5)
    parser.add_argument("--local_world_size", type=int, help="processes on this node")
    args, overrides = parser.parse_known_args()
    if args.local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(args.local_world_size)
    epochs, every = f"trainer.epochs={args.total_epochs}", f"trainer.save.epochs={args.save_every}"
    echelon.main(experiment, [epochs, every, *overrides])

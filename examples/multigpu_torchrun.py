"""All GPUs of a machine: torchrun --standalone --nproc_per_node=4 multigpu_torchrun.py 50 10"""

import argparse

from toy import experiment

import echelon

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int, help="how long to train")
    parser.add_argument("save_every", type=int, help="epochs between two snapshots")
    args = parser.parse_args()
    epochs, every = f"trainer.epochs={args.total_epochs}", f"trainer.save.epochs={args.save_every}"
    echelon.main(experiment, [epochs, every])

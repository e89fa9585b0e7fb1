"""Not distributed: python single_gpu.py [TOTAL_EPOCHS] [SAVE_EVERY]"""

import argparse

from toy import experiment

import echelon

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int, nargs="?", default=10)
    parser.add_argument("save_every", type=int, nargs="?", default=5)
    args = parser.parse_args()
    epochs, every = f"trainer.epochs={args.total_epochs}", f"trainer.save.epochs={args.save_every}"
    echelon.main(experiment, [epochs, every])

"""A program as a group has many: options in, one result out, nothing of Echelon in it."""

from __future__ import annotations

import argparse
import math

from tabulate import tabulate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--layers", default="64", help="widths, such as 64,64")
    given = parser.parse_args()
    widths = [int(width) for width in given.layers.split(",")]
    steps = 100 * given.train
    loss = sum(math.exp(-given.lr * step / given.batch_size) for step in range(steps, steps + 10))
    print(tabulate([(given.batch_size, given.lr, widths, loss)], ["batch", "lr", "layers", "loss"]))


if __name__ == "__main__":
    main()

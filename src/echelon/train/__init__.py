"""The training of one run: the worker process, what it builds, the loop, evaluation.

Read in this order: `worker.py` (one rank from start to exit), `prepare.py` (what is built, in
numbered steps), `loop.py` (the loop and what happens between two steps), `evaluate.py`.
"""

"""Three jobs at once on this machine, and their results: python python_jobs.py"""

import random

import echelon


def simulate(seed: int, samples: int = 100_000) -> dict[str, float]:
    """Estimate pi by random points, as a job of its own."""
    draw = random.Random(seed).random
    inside = sum(draw() ** 2 + draw() ** 2 < 1 for _ in range(samples))
    return {"seed": seed, "pi": 4 * inside / samples}


if __name__ == "__main__":
    jobs = [echelon.submit("python_jobs.py:simulate", [seed], launch="local") for seed in range(3)]
    for job in jobs:
        print(job.run, job.result())

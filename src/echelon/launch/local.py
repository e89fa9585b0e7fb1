"""launch=local: the workers of one machine, under torchrun's elastic agent in this process."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict

from echelon.config.schema import Launch
from echelon.failure import Failure
from echelon.launch.plan import Plan
from echelon.launch.zygote import Zygote
from echelon.runs import Run

WORKER = "echelon.train.worker:work"
_PRELOADED = ("torch", "torch._dynamo", "echelon.train.worker", "echelon.experiments")
"""DDP and torch's optimizers import torch._dynamo on first use, in every process."""


def launch(run: Run, config: Launch, plan: Plan) -> int:
    """Carry out the plan; the exit code is the training's."""
    os.environ |= dict(plan.variables)  # before torch is imported: its thread pools read them
    import torch  # noqa: F401  once: what is forked from here shares it

    zygote = Zygote(_PRELOADED)
    # From here on threads may start; the zygote imports the rest at the same time.
    from echelon.launch.agent import Agent, loopback_store, one_node_spec

    store = loopback_store()
    spec = one_node_spec(store, run.name, len(plan.places), config.max_restarts)
    agent = Agent(spec, store, zygote, run, config.hang_s, WORKER)
    agent.listen()
    result = agent.run()
    if result.is_failed():
        return _failed(run, agent.failure)
    return int(max(result.return_values.values()))


def _failed(run: Run, failure: Failure | None) -> int:
    assert failure is not None
    run.update_status(state="failed", step=failure.step, failure=asdict(failure))
    print(f"\n{failure}", file=sys.stderr)
    return failure.exit

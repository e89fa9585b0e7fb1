"""Environments of jobs: from a source folder's own files, made once, kept by what decides them.

Where several files could decide, the first of this order does, and it is said: `Pipfile`,
`requirements.txt`, `uv.lock`, `pyproject.toml` (with a [project]), `environment.yml`.
"""

from __future__ import annotations

from echelon.envs.activate import activation
from echelon.envs.build import build
from echelon.envs.plan import EnvPlan, plan

__all__ = ["EnvPlan", "activation", "build", "plan"]

"""Environments of jobs: from a source folder's own files, made once, kept by what decides them.

Where several files could decide, the first of this order does, and it is said: `Pipfile`,
`requirements.txt`, `uv.lock`, `pyproject.toml` (with a [project]), `environment.yml`.
"""

from __future__ import annotations

from echelon.environments.activate import activation_lines
from echelon.environments.build import build_environment
from echelon.environments.build_plan import EnvironmentPlan, plan_environment

__all__ = ["EnvironmentPlan", "activation_lines", "build_environment", "plan_environment"]

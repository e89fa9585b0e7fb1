"""The Python environments of jobs: built once from a source folder's dependency files, then shared
by every job with the same dependencies.

The first file in this order determines the environment, and the others are reported as ignored:
`Pipfile`, `requirements.txt`, `uv.lock`, `pyproject.toml` (with a [project]), `environment.yml`.

`plan_environment` reads the files and says what would be built, `build_environment` builds it, and
`render_activation_lines` gives the shell lines by which a batch script enters it.
"""

from __future__ import annotations

from echelon.environments.activate import render_activation_lines
from echelon.environments.build import build_environment
from echelon.environments.build_plan import EnvironmentPlan, plan_environment

__all__ = ["EnvironmentPlan", "build_environment", "plan_environment", "render_activation_lines"]

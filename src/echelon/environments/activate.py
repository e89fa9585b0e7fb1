"""The shell lines by which a batch script enters its environment."""

from __future__ import annotations

import shlex

from echelon.environments.build_plan import EnvironmentPlan
from echelon.environments.cache import EnvironmentPaths

_LOCK_TIMEOUT_S = 60
"""How long a job waits for `echelon env clean` to finish removing its environment."""


def render_activation_lines(plan: EnvironmentPlan) -> list[str]:
    """Return the lines for a bash script that has changed into the job's copy of the source.

    The shell holds a shared lock (`flock -s`) until it ends, so that `echelon env clean` on any
    host that shares the cache sees that a job uses the environment. If a clean is removing it at
    this moment, the lines wait for the lock: whether the environment exists is only certain after
    them.
    """
    if plan.kind == "none":
        return []
    paths = EnvironmentPaths(plan.folder)
    quoted, use = shlex.quote(str(paths.folder)), shlex.quote(str(paths.use_lock))
    return [
        f"touch -c -- {use} 2>/dev/null || :",
        f"if exec {{ECHELON_ENV_FD}}<{use}; then flock -s -w {_LOCK_TIMEOUT_S} "
        '"$ECHELON_ENV_FD" || :; fi 2>/dev/null',
        "unset PYTHONHOME",
        *(
            _render_conda_lines(quoted)
            if plan.kind == "conda"
            else [f"export VIRTUAL_ENV={quoted}"]
        ),
        f'export PATH={quoted}/bin"${{PATH:+:$PATH}}"',
        *_render_pythonpath_lines(plan),
    ]


def _render_conda_lines(quoted: str) -> list[str]:
    """Return what `conda activate PREFIX` does, for a shell without conda's functions."""
    return [
        f"export CONDA_PREFIX={quoted} CONDA_DEFAULT_ENV={quoted}",
        f"for f in {quoted}/etc/conda/activate.d/*.sh; do "
        'if [ -r "$f" ]; then . "$f"; fi; done; unset f',
    ]


def _render_pythonpath_lines(plan: EnvironmentPlan) -> list[str]:
    """Return the line that makes the project's own package importable from the job's copy.

    The package is not installed into the environment. So an edit needs no new environment, and the
    code that was submitted is the code that runs.
    """
    if plan.kind not in ("pyproject", "uv.lock"):
        return []
    roots = '"$PWD/src:$PWD"' if (plan.source / "src").is_dir() else '"$PWD"'
    return [f'export PYTHONPATH={roots}"${{PYTHONPATH:+:$PYTHONPATH}}"']

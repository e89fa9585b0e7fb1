"""The shell lines that put a job into its environment."""

from __future__ import annotations

import shlex

from echelon.environments.build_plan import EnvironmentPlan
from echelon.environments.cache import EnvironmentPaths

_LOCK_TIMEOUT_S = 60


def activation_lines(plan: EnvironmentPlan) -> list[str]:
    """For a batch script, in bash, after it went to the copy of the source.

    The shell keeps a shared lock for as long as it lives, so that `echelon env clean` sees the
    job from any host that shares the cache. One that removes it just now is waited for: only
    after these lines can be told whether it is there.
    """
    if plan.kind == "none":
        return []
    place = EnvironmentPaths(plan.folder)
    quoted, use = shlex.quote(str(place.folder)), shlex.quote(str(place.use_lock))
    return [
        f"touch -c -- {use} 2>/dev/null || :",
        f"if exec {{ECHELON_ENV_FD}}<{use}; then flock -s -w {_LOCK_TIMEOUT_S} "
        '"$ECHELON_ENV_FD" || :; fi 2>/dev/null',
        "unset PYTHONHOME",
        *(_conda_lines(quoted) if plan.kind == "conda" else [f"export VIRTUAL_ENV={quoted}"]),
        f'export PATH={quoted}/bin"${{PATH:+:$PATH}}"',
        *_pythonpath_lines(plan),
    ]


def _conda_lines(quoted: str) -> list[str]:
    """What `conda activate` does for a prefix, without a shell that knows conda."""
    return [
        f"export CONDA_PREFIX={quoted} CONDA_DEFAULT_ENV={quoted}",
        f"for f in {quoted}/etc/conda/activate.d/*.sh; do "
        'if [ -r "$f" ]; then . "$f"; fi; done; unset f',
    ]


def _pythonpath_lines(plan: EnvironmentPlan) -> list[str]:
    """A project's own package is not installed but found in the job's copy: an edit then needs no
    new environment, and what was submitted is what runs."""
    if plan.kind not in ("pyproject", "uv.lock"):
        return []
    roots = '"$PWD/src:$PWD"' if (plan.source / "src").is_dir() else '"$PWD"'
    return [f'export PYTHONPATH={roots}"${{PYTHONPATH:+:$PYTHONPATH}}"']

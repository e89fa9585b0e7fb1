"""What failed, from what pip, uv and conda said: texts as the tools print them."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.environments.build_errors import explain_build_failure, find_failed_packages
from echelon.environments.requirements import RequirementLine

SOURCE = Path("/s")
WANTED = [
    RequirementLine("six", SOURCE / "requirements.txt", 1),
    RequirementLine("No_Such.pkg==3", SOURCE / "more" / "base.txt", 7),
]

PIP = """\
Looking in links: /w
Processing /w/six-1.17.0-py2.py3-none-any.whl
ERROR: Could not find a version that satisfies the requirement no-such-pkg==3 (from versions: none)
ERROR: No matching distribution found for no-such-pkg==3
"""
UV = """\
Using Python 3.11.7 environment at: v
error: No solution found when resolving dependencies
  cause: Because no-such-pkg was not found in the provided package locations and you require \
no-such-pkg==3, we can conclude that your requirements are unsatisfiable.
"""
UV_VERSION = """\
  × No solution found when resolving dependencies:
  ╰─▶ Because there is no version of no-such-pkg==3 and you require no-such-pkg==3, we can \
conclude that your requirements are unsatisfiable.
"""
UV_BUILD = """\
  × Failed to build `no-such-pkg==3`
  ├─▶ The build backend returned an error
"""
PIP_BUILD = """\
Collecting six
Collecting no-such-pkg==3
  error: subprocess-exited-with-error
  × Getting requirements to build wheel did not run successfully.
"""
PIP_METADATA = """\
error: metadata-generation-failed

× Encountered error while generating package metadata.
╰─> See above for output.
  ╰─> no-such-pkg
"""
UV_FETCH = """\
error: Request failed after 3 retries in 7.6s
  cause: Failed to fetch: `https://files.example/no_such_pkg-3-py3-none-any.whl`
"""
CONDA = """\
Collecting package metadata (repodata.json): ...working... done
Solving environment: ...working... failed

ResolvePackageNotFound: 
  - no-such-pkg==3
"""
MAMBA = """\
error    libmamba Could not solve for environment specs
    The following package could not be installed
    └─ no-such-pkg 3** does not exist (perhaps a typo or a missing channel).
"""


@pytest.mark.parametrize(
    "log", [PIP, UV, UV_VERSION, UV_BUILD, UV_FETCH, PIP_BUILD, PIP_METADATA, CONDA, MAMBA]
)
def test_the_requirement_is_named_with_its_line(log: str) -> None:
    (fault,) = explain_build_failure(log, WANTED, SOURCE, Path("/kept.log"))
    first = fault.what.splitlines()[0]
    assert ": No_Such.pkg==3 (more/base.txt:7)" in first
    assert log.rstrip().splitlines()[-1].strip() in fault.what
    assert fault.do == "read the whole log: /kept.log"


def test_an_indirect_dependency_is_named_as_such() -> None:
    log = "ERROR: No matching distribution found for deep>=2 (from six)"
    (fault,) = explain_build_failure(log, WANTED, SOURCE, Path("/l"))
    assert "could not be built: deep, which another package needs" in fault.what


def test_no_password_of_a_requirement_is_shown() -> None:
    wanted = [
        RequirementLine("deep @ https://user:canary@h/deep-1-py3-none-any.whl", SOURCE / "r.txt", 1)
    ]
    (fault,) = explain_build_failure(
        "ERROR: No matching distribution found for deep", wanted, SOURCE, Path("/l")
    )
    assert "deep @ https://****@h/deep-1" in fault.what


def test_known_causes_are_reported() -> None:
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    (fault,) = explain_build_failure(full, WANTED, SOURCE, Path("/l"))
    assert "no space is left on the disk" in fault.what
    assert find_failed_packages("all is well") == []


def test_only_the_last_lines_are_shown() -> None:
    (fault,) = explain_build_failure(
        "\n".join(f"line {i}" for i in range(99)), WANTED, SOURCE, Path("/l")
    )
    assert "line 98" in fault.what
    assert "line 80" not in fault.what

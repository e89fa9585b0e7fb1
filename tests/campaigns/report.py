"""What the campaigns share: where and when it was, as which command, with what, and the result."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]

from common import describe_machine, read_versions  # noqa: E402  the benchmarks' own


def write(path: Path, result: dict[str, Any]) -> None:
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    where = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": describe_machine(),
        "versions": read_versions(),
        "command": " ".join(["python", str(name), *sys.argv[1:]]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**where, **result}, indent=1) + "\n")

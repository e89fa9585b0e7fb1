"""What a machine tells another about its GPUs: a line of JSON for each look.

The text of this file and of those that it needs is sent to the other machine's Python, which may
lack Echelon and may be as old as 3.9.
"""

from __future__ import annotations

import json
import sys
import time

from echelon.gpus.probe import GpuProbe
from echelon.gpus.state import node_to_dict

LINE_MARK = "\x1e"
"""A login may print words of its own; lines that begin so are ours."""


def print_reports(interval_s: float) -> None:
    """Once, or until nobody listens any more."""
    probe = GpuProbe()
    try:
        while True:
            print(LINE_MARK + json.dumps(node_to_dict(probe.read_node())), flush=True)
            if not interval_s:
                return
            time.sleep(interval_s)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()

"""What a machine tells another about its GPUs: a line of JSON for each look.

The text of this file and of those that it needs is sent to the other machine's Python, which may
lack Echelon and may be as old as 3.9.
"""

from __future__ import annotations

import sys
import time

from echelon.gpus.probe import GpuProbe
from echelon.gpus.state import node_to_dict
from echelon.hosts.messages import send_message


def print_reports(interval_s: float) -> None:
    """Once, or until nobody listens any more."""
    probe = GpuProbe()
    try:
        while True:
            send_message(node_to_dict(probe.read_node()))
            if not interval_s:
                return
            time.sleep(interval_s)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()

"""What a machine tells another about its GPUs: a line of JSON for each look.

The text of this file and of those that it needs is sent to the other machine's Python, which may
lack Echelon and may be as old as 3.9.
"""

from __future__ import annotations

import json
import sys
import time

from echelon.gpus.look import Machine
from echelon.gpus.snapshot import to_dict

MARK = "\x1e"
"""A login may print words of its own; lines that begin so are ours."""


def tell(every_s: float) -> None:
    """Once, or until nobody listens any more."""
    machine = Machine()
    try:
        while True:
            print(MARK + json.dumps(to_dict(machine.look())), flush=True)
            if not every_s:
                return
            time.sleep(every_s)
    except (BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()

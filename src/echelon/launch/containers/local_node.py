"""The agent of launch=local in a container.

It is the far end of a connection, as with launch=ssh: it reads messages on its standard input and
ends with that. So a stop reaches it through any runtime, whether or not that passes on signals, and
nothing outlives the command that was typed, however it ends.
"""

from __future__ import annotations

import signal
import socket
import sys

from echelon.config.schema import Config
from echelon.errors import ExitCode
from echelon.launch.containers.command import wrap_python
from echelon.launch.ssh import sessions
from echelon.runs.process_record import make_starting_status
from echelon.runs.run_folder import Run
from echelon.runs.writer import release_run_folder


def run_local_node(config: Config, run: Run, procs: int) -> int:
    """Run the agent in the container until it has ended; returns the exit code of the run. The
    folder of the run was created by this process, and is left to the agent."""
    # Forked for a trial of a sweep, this process has the stop signals blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR2))
    run.update_status(**make_starting_status("local", 1, procs))
    release_run_folder(run)
    node = ["--tether", "--nodes", "1", "--node-rank", "0", "--procs", str(procs)]
    python = [sys.executable, *(["-P"] if config.program else [])]
    command = wrap_python(config, [*python, "-m", "echelon", "node", *node, str(run.folder)])
    host = socket.gethostname()

    def start_session(host_index: int, node: int) -> sessions.SshSession:
        session = sessions.start_session(node, host_index, host, command, b"")
        session.is_here = True
        return session

    outcome = sessions.SshSessions([host], start_session, config.launch.silence_s).wait_for_all()
    if outcome.code not in (ExitCode.OK, ExitCode.PREEMPTED):
        _record_silent_end(run, outcome)
    if outcome.cause:
        print(outcome.cause, file=sys.stderr)
    return outcome.code


def _record_silent_end(run: Run, outcome: sessions.SshLaunchOutcome) -> None:
    """Write the failure of an agent that did not live to write one."""
    status = run.read_status_file()
    if status.get("state") != "failed" or not status.get("failure"):
        run.update_status(state="failed", failure=outcome.failure)

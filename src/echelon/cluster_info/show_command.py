"""`echelon cluster`: what is free, and when a job would start."""

from __future__ import annotations

import json
from collections.abc import Sequence

from echelon.cluster_info.cluster_facts import read_facts
from echelon.cluster_info.free_table import JobEstimate, describe_free, render_free
from echelon.cluster_info.login_probe import NO_SECTION, LoginNode, build_probe
from echelon.cluster_info.start_estimate import read_estimate, render_test_job, try_changes
from echelon.config.schema import Config
from echelon.errors import ExitCode
from echelon.views.table import get_width
from echelon.views.terminal import create_console


def show_cluster(
    node: LoginNode,
    config: Config | None,
    settings: Sequence[str],
    defaults: Sequence[str],
    as_json: bool,
) -> int:
    """Print what is free, and about a job with this configuration; returns the exit code.

    `settings` were typed, `defaults` are what files add to them.

    The login node is asked once, and a second time only where the job would have to wait.
    """
    jobs = [render_test_job(config)] if config is not None else []
    sections = node.ask(build_probe(jobs=jobs))
    facts = read_facts(node, sections)
    job = None
    if config is not None:
        estimate = read_estimate(sections.get("job 0", NO_SECTION))
        sooner, tried = try_changes(node, facts, config, estimate)
        job = JobEstimate(settings, estimate, sooner, tried, defaults)
    if as_json:
        print(json.dumps(describe_free(facts, job), indent=2))
        return ExitCode.OK
    console = create_console()
    for line in render_free(facts, job, get_width(console)):
        console.print(line)
    return ExitCode.OK

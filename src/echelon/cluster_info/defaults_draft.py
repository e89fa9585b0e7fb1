"""An `echelon.yaml` for a cluster, in which a comment explains every line."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from echelon.cluster_info.cluster_facts import (
    OLDEST_VERSION,
    Association,
    ClusterFacts,
    Partition,
    format_time_limit,
)
from echelon.utils.text import format_bytes, format_count

_WIDTH = 96
_MAX_LISTED = 12
_USUAL_TIME_S = 4 * 3600
"""Short jobs start earlier, and a run goes on in as many as it needs."""
_LEAST_PYTHON = (3, 10)
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_.,@/-]*")


class DraftSetting(NamedTuple):
    """A default of launch, and why it has its value."""

    key: str
    value: Any
    """None: the line is only a comment, with what could be set."""
    reason: str
    example: str = ""
    """The line of a setting that is left out."""


def draft_settings(facts: ClusterFacts) -> list[DraftSetting]:
    """Return the settings of launch for this cluster and user."""
    partition = choose_partition(facts)
    return [
        _draft_partition(facts, partition),
        *_draft_account(facts),
        *_draft_qos(facts),
        *_draft_gpus(facts, partition),
        _draft_time(facts, partition),
        *_draft_max_parallel(facts),
        *_draft_names("reservation", facts.reservations, "reservations that there are now"),
        *_draft_names("licenses", facts.licenses, "licences that jobs can take"),
        *_draft_setup(facts),
    ]


def render_draft(facts: ClusterFacts, command: str) -> str:
    """Return the text of the file. `command` is what a person types to make it again."""
    slurm = f"Slurm {facts.version}" if facts.version else "Slurm"
    name = facts.cluster or facts.host
    lines = [
        *_comment(
            f"Defaults of launch=slurm on the cluster {name} ({slurm}), as {facts.user} sees it. "
            f"Written by `{command}` on {facts.now:%Y-%m-%d}. Change what you like: what is typed "
            "goes before this file, as in: echelon train launch=slurm launch.partition=OTHER"
        ),
        *_describe_machine(facts),
        "launch:",
    ]
    for setting in draft_settings(facts):
        lines += _comment(f"{setting.key}: {setting.reason}", "  ")
        if setting.value is not None:
            lines.append(f"  {setting.key}: {_format_yaml(setting.value)}")
        elif setting.example:
            lines.append(f"  # {setting.key}: {setting.example}")
    return "\n".join([*lines, ""])


def collect_values(settings: Sequence[DraftSetting]) -> Mapping[str, Any]:
    """Return the settings that have a value."""
    return {f"launch.{s.key}": s.value for s in settings if s.value is not None}


def choose_partition(facts: ClusterFacts) -> Partition | None:
    """Return the partition to use: the default, unless it has no GPUs where others have some, or
    this user may not use it."""
    usable = [p for p in facts.partitions if not p.obstacle] or list(facts.partitions)

    def rank(partition: Partition) -> tuple[bool, bool, int]:
        gpus = sum(partition.count_all_gpus().values())
        return (gpus > 0, partition.is_default, gpus)

    return max(usable, key=rank, default=None)


# --- one setting each ---


def _draft_partition(facts: ClusterFacts, chosen: Partition | None) -> DraftSetting:
    others = [p for p in facts.partitions if p is not chosen]
    listed = "; ".join(_describe_partition(p) for p in others[:_MAX_LISTED])
    listed += "; …" if len(others) > _MAX_LISTED else ""
    if chosen is None:
        return DraftSetting("partition", None, "the cluster shows none", "NAME")
    why = "the cluster's default" if chosen.is_default else "the one with most GPUs for you"
    rest = f". Others: {listed}" if others else ""
    return DraftSetting(
        "partition", chosen.name, f"{why}, {_describe_partition(chosen)}{rest}. a,b takes several"
    )


def _describe_partition(partition: Partition) -> str:
    counts = partition.count_all_gpus().items()
    gpus = ", ".join(f"{total} {kind or 'GPUs'}" for kind, total in counts)
    limit = partition.max_time_s
    parts = [
        format_count(len(partition.nodes), "node"),
        *([gpus] if gpus else []),
        f"at most {format_time_limit(limit)}" if limit else "no time limit",
        *([f"not for you: {partition.obstacle}"] if partition.obstacle else []),
    ]
    return f"{partition.name} ({', '.join(parts)})"


def _list_accounts(facts: ClusterFacts) -> list[str]:
    """Return the accounts of this user, the default one first."""
    names = dict.fromkeys(a.account for a in facts.associations)
    return sorted(names, key=lambda name: name != facts.default_account)


def _list_own_associations(facts: ClusterFacts) -> list[Association]:
    """Return what the user may do by the account that is proposed."""
    return [a for a in facts.associations if a.account == _list_accounts(facts)[0]]


def _draft_account(facts: ClusterFacts) -> Iterator[DraftSetting]:
    names = _list_accounts(facts)
    if facts.accounting_error:
        what = f"accounting did not answer: {facts.accounting_error}"
        yield DraftSetting("account", None, what, "NAME")
    elif not facts.has_accounting:
        yield DraftSetting("account", None, "this cluster keeps no accounting, and needs none")
    elif names:
        default, *others = names
        rest = f" You have {', '.join(others[:_MAX_LISTED])} too." if others else ""
        yield DraftSetting("account", default, f"what jobs are charged to.{rest}")


def _draft_qos(facts: ClusterFacts) -> Iterator[DraftSetting]:
    own = _list_own_associations(facts)
    allowed = list(dict.fromkeys(name for a in own for name in a.qos))
    default = next((a.default_qos for a in own if a.default_qos), "")
    if not allowed:
        return
    limits = {q.name: q for q in facts.qos}
    texts = []
    for name in allowed[:_MAX_LISTED]:
        qos = limits.get(name)
        facts_of_it = [] if qos is None else [f"priority {qos.priority}"]
        if qos is not None and qos.max_time_s:
            facts_of_it.append(f"at most {format_time_limit(qos.max_time_s)}")
        if qos is not None and qos.max_tres_per_user:
            facts_of_it.append(f"{qos.max_tres_per_user} per user")
        if qos is not None and qos.max_jobs_per_user:
            facts_of_it.append(f"{format_count(qos.max_jobs_per_user, 'job')} per user")
        texts.append(f"{name} ({', '.join(facts_of_it)})" if facts_of_it else name)
    example = next((name for name in allowed if name != default), allowed[0])
    usual = f"without it {default}. " if default else ""
    yield DraftSetting("qos", None, f"{usual}You may use {'; '.join(texts)}", example)


def _draft_gpus(facts: ClusterFacts, chosen: Partition | None) -> Iterator[DraftSetting]:
    counts = chosen.count_all_gpus() if chosen else {}
    if not counts or chosen is None:
        yield DraftSetting(
            "gpus_per_node", None, "Slurm shows no GPUs that you may use (gres)", "1"
        )
        return
    kinds = [f"{kind or 'gpu'} (up to {chosen.find_gpus_per_node(kind)} a node)" for kind in counts]
    typed = next((kind for kind in counts if kind), "")
    how = f" With a type: {typed}:1." if typed else ""
    yield DraftSetting(
        "gpus_per_node",
        1,
        f"GPUs of each node, with a process each. {chosen.name} has {', '.join(kinds)}.{how}",
    )
    if facts.select_type and facts.select_type != "cons_tres":
        yield DraftSetting(
            "gpu_request",
            "gres",
            f"this cluster selects nodes by {facts.select_type}, which knows no --gpus-per-node",
        )


def _draft_time(facts: ClusterFacts, chosen: Partition | None) -> DraftSetting:
    limits = {
        **({f"partition {chosen.name}": chosen.max_time_s} if chosen else {}),
        **{f"account {a.account}": a.max_time_s for a in _list_own_associations(facts)},
    }
    least = min(((s, name) for name, s in limits.items() if s), default=None)
    seconds = min(_USUAL_TIME_S, least[0]) if least else _USUAL_TIME_S
    most = f"At most {format_time_limit(least[0])} ({least[1]})" if least else "There is no limit"
    return DraftSetting(
        "time",
        format_time_limit(seconds),
        "of one job: a run saves before its end and goes on in the next, and short jobs start "
        f"earlier. {most}",
    )


def _draft_max_parallel(facts: ClusterFacts) -> Iterator[DraftSetting]:
    limits = [a.max_jobs for a in _list_own_associations(facts) if a.max_jobs]
    if limits:
        yield DraftSetting(
            "max_parallel", min(limits), "runs of an array at once: you may run no more jobs"
        )


def _draft_names(key: str, names: Sequence[str], what: str) -> Iterator[DraftSetting]:
    if names:
        yield DraftSetting(key, None, f"{what}: {', '.join(names[:_MAX_LISTED])}", names[0])


def _draft_setup(facts: ClusterFacts) -> Iterator[DraftSetting]:
    if facts.modules:
        listed = ", ".join(facts.modules[:_MAX_LISTED])
        more = ", …" if len(facts.modules) > _MAX_LISTED else ""
        yield DraftSetting(
            "setup",
            None,
            f"lines before a training. Modules that may matter: {listed}{more}",
            json.dumps([f"module load {facts.modules[0]}"]),
        )


# --- what is no setting, but worth knowing ---


def _describe_machine(facts: ClusterFacts) -> list[str]:
    """Return comments on software and folders."""
    lines: list[str] = []
    if facts.version is not None and facts.version < OLDEST_VERSION:
        lines += _comment(
            f"Slurm {facts.version} is older than {OLDEST_VERSION}, the oldest that is looked "
            "after. Options that it does not know are refused, with its version."
        )
    versions = {version: path for path, version in reversed(facts.pythons)}
    pythons = ", ".join(f"{version} ({path})" for version, path in sorted(versions.items()))
    is_new = any(_read_minor(version) >= _LEAST_PYTHON for version in versions)
    least = ".".join(map(str, _LEAST_PYTHON))
    lines += _comment(
        f"Python on {facts.host}: {pythons or 'none'}."
        + ("" if is_new else f" Echelon needs {least} or newer: a module or conda may have it.")
    )
    containers = ", ".join(f"{name} {version}".strip() for name, version in facts.containers)
    lines += _comment(f"Containers: {containers or 'no program for them was found'}.")
    shared = [f for f in facts.folders if f.is_shared and f.is_writable]
    listed = ", ".join(
        f"{f.path} ({f.filesystem}, {format_bytes(f.free_kb * 1024)} free)" for f in shared
    )
    lines += _comment(
        f"Runs must be in a folder that all nodes see, by run.dir=FOLDER: {listed}."
        if shared
        else "Runs must be in a folder that all nodes see, by run.dir=FOLDER. No folder here is on "
        "a file system that is known to be shared: ask which one is."
    )
    return lines


def _read_minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _comment(text: str, indent: str = "") -> list[str]:
    """Return a text as lines of comments. What came from the cluster cannot begin a line."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return textwrap.wrap(
        plain,
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_yaml(value: Any) -> str:
    if isinstance(value, int):
        return str(value)
    text = str(value)
    is_word = _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS
    return text if is_word else json.dumps(text)


_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}

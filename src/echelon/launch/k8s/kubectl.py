"""kubectl: objects are created, looked at and deleted by the command that the user has set up.

Nothing here keeps a connection or a credential of its own.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from echelon.config.schema import KubernetesConfig
from echelon.errors import EchelonError, ExitCode, Fault
from echelon.launch.k8s.manifest import INSTANCE_LABEL, NAME_LABEL, Manifest, render_yaml
from echelon.utils.os_errors import format_os_error_reason

_TIMEOUT_S = 120.0
_KINDS = {"job": "jobs.batch", "jobset": "jobsets.jobset.x-k8s.io"}
START_LABEL = "echelon/start"
"""Which start has made an object."""
_ENDINGS = {"Complete": True, "Completed": True, "Failed": False}
"""Conditions of Jobs and JobSets by which they are over, and whether they ended well."""


class ResourceState(NamedTuple):
    """A Job or JobSet as the cluster knows it."""

    uid: str
    is_over: bool
    has_succeeded: bool
    message: str
    """Why it failed, in the words of Kubernetes."""


def require_kubectl() -> None:
    """Refuse a machine without kubectl."""
    if shutil.which("kubectl") is None:
        raise EchelonError(
            Fault(
                "launch=k8s, but there is no kubectl on this machine's PATH",
                "--dry-run prints the manifest anywhere; type the command where kubectl is set up",
            )
        )


def make_kubectl_words(k8s: KubernetesConfig, *words: str) -> list[str]:
    """Return a command of kubectl in the context and the namespace of the settings."""
    context = [f"--context={k8s.context}"] if k8s.context else []
    namespace = [f"--namespace={k8s.namespace}"] if k8s.namespace else []
    return ["kubectl", *context, *namespace, *words]


def require_cluster_accepts(k8s: KubernetesConfig, objects: Sequence[Manifest]) -> None:
    """Have the API server check the objects, without keeping them. Its own words say what it does
    not take: a missing JobSet, a quota, a name."""
    _run(k8s, "create", "--dry-run=server", "-f", "-", objects=objects)


def create_objects(k8s: KubernetesConfig, objects: Sequence[Manifest]) -> None:
    """Create the objects of a run, whose last one is the Job or JobSet, which then owns the others:
    they are deleted with it. If one cannot be created, those before it are deleted again, and none
    of a run of the same name that somebody else has started meanwhile."""
    label = {START_LABEL: secrets.token_hex(8)}
    objects = [_add_labels(each, label) for each in objects]
    try:
        created = _run(k8s, "create", "-f", "-", "-o", "json", objects=objects)
        owner = _find_owner(created, objects[-1]["kind"])
        owned = [
            {**each, "metadata": each["metadata"] | {"ownerReferences": [owner]}}
            for each in objects[:-1]
        ]
        _run(k8s, "replace", "-f", "-", objects=owned)
    except EchelonError:
        _delete_labelled(k8s, label, waits=False)
        raise


def _add_labels(document: Manifest, labels: dict[str, str]) -> Manifest:
    metadata = document["metadata"]
    return {**document, "metadata": metadata | {"labels": metadata["labels"] | labels}}


def _find_owner(created: str, kind: str) -> dict[str, str]:
    """Return the reference to the Job or JobSet in what `kubectl create` printed: a document for
    each object, or one list of them."""
    decoder, position = json.JSONDecoder(), 0
    while (start := created.find("{", position)) >= 0:
        document, position = decoder.raw_decode(created, start)
        for each in document.get("items", [document]):
            if each["kind"] == kind:
                metadata = each["metadata"]
                return {
                    "apiVersion": each["apiVersion"],
                    "kind": kind,
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                }
    raise EchelonError(
        Fault(f"kubectl created no {kind}", "see `kubectl get events`"), exit=ExitCode.FAILED
    )


def read_state(k8s: KubernetesConfig, name: str) -> ResourceState | None:
    """Return the state of a run's Job or JobSet; None if there is none."""
    text = _run(k8s, "get", _KINDS[k8s.resource], name, "--ignore-not-found", "-o", "json")
    if not text.strip():
        return None
    document = json.loads(text)
    for condition in document.get("status", {}).get("conditions", []):
        if condition["status"] == "True" and condition["type"] in _ENDINGS:
            has_succeeded = _ENDINGS[condition["type"]]
            message = "" if has_succeeded else str(condition.get("message", ""))
            return ResourceState(document["metadata"]["uid"], True, has_succeeded, message)
    return ResourceState(document["metadata"]["uid"], False, False, "")


def delete_objects(k8s: KubernetesConfig, name: str, waits: bool = False) -> None:
    """Delete all objects of a run, and wait until they are gone if asked to. Its pods get TERM, on
    which they save, and as long for that as launch.k8s.grace_s says."""
    _delete_labelled(k8s, {NAME_LABEL: "echelon", INSTANCE_LABEL: name}, waits)


def _delete_labelled(k8s: KubernetesConfig, labels: dict[str, str], waits: bool) -> None:
    kinds = ",".join([_KINDS[k8s.resource], "services", "configmaps", "secrets"])
    label = ",".join(f"{key}={value}" for key, value in labels.items())
    how = ["--wait=true", "--timeout=60s"] if waits else ["--wait=false"]
    _run(k8s, "delete", kinds, "-l", label, "--ignore-not-found", *how)


def _run(k8s: KubernetesConfig, *words: str, objects: Sequence[Manifest] = ()) -> str:
    """Run kubectl and return what it printed; raise its own words if it failed."""
    command = make_kubectl_words(k8s, *words)
    text = render_yaml(list(objects)) if objects else None
    try:
        done = subprocess.run(
            command,
            input=text,
            stdin=None if text else subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
        )
        code, reason = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        code, reason = 1, f"it did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        code, reason = 127, f"it cannot be run: {format_os_error_reason(error)}"
    if code == 0:
        return done.stdout
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    raise EchelonError(
        Fault(
            f"kubectl {words[0]} failed: {'; '.join(lines) or f'it ended with {code}'}",
            "`kubectl auth can-i create jobs` has to say yes; launch.k8s.context and namespace "
            "choose the cluster",
        )
    )

"""Stands in for kubectl, since tests have no cluster: it keeps objects in a folder and answers as
the real one does, in its words and with its exit codes. It knows what `launch/k8s/kubectl.py`
calls."""

from __future__ import annotations

import json
import os
import stat
import sys
import uuid
from pathlib import Path
from typing import Any

import yaml

PLURALS = {
    "jobs.batch": "Job",
    "jobsets.jobset.x-k8s.io": "JobSet",
    "services": "Service",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
}
GROUPS = {"Job": "jobs.batch", "JobSet": "jobsets.jobset.x-k8s.io"}


class FakeCluster:
    """The objects behind a fake kubectl that is first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.objects, self.bin = folder / "objects", folder / "bin"
        self.calls_file, self.refusal_file = folder / "calls", folder / "refusal"
        self.objects.mkdir()
        self.bin.mkdir()
        script = self.bin / "kubectl"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    @property
    def path(self) -> str:
        return f"{self.bin}:{os.environ['PATH']}"

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def read(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.objects.glob(f"{kind} *"))]

    def refuse(self, kind: str, words: str) -> None:
        """Have the API server refuse to keep objects of a kind, in these words."""
        self.refusal_file.write_text(json.dumps([kind, words]))

    def finish(self, kind: str, condition: str, message: str = "") -> None:
        """Let a Job or JobSet come to its end."""
        [file] = self.objects.glob(f"{kind} *")
        ended = {"type": condition, "status": "True", "message": message}
        document = json.loads(file.read_text())
        file.write_text(json.dumps(document | {"status": {"conditions": [ended]}}))


def main(folder: Path, words: list[str]) -> int:
    cluster = FakeCluster.__new__(FakeCluster)
    cluster.objects, cluster.refusal_file = folder / "objects", folder / "refusal"
    with (folder / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    words = [w for w in words if not w.startswith(("--context=", "--namespace="))]
    verb, rest = words[0], words[1:]
    if verb in ("create", "replace"):
        return _write(cluster, verb, "--dry-run=server" in rest, "json" in rest)
    if verb == "get":
        file = cluster.objects / f"{PLURALS[rest[0]]} {rest[1]}"
        print(file.read_text() if file.exists() else "", end="")
        return 0
    assert verb == "delete"
    assert rest[1] == "-l"
    wanted = dict(pair.split("=") for pair in rest[2].split(","))
    for file in cluster.objects.iterdir():
        document = json.loads(file.read_text())
        is_kind = document["kind"] in [PLURALS[plural] for plural in rest[0].split(",")]
        if is_kind and wanted.items() <= document["metadata"]["labels"].items():
            file.unlink()
    return 0


def _write(cluster: FakeCluster, verb: str, is_dry: bool, as_json: bool) -> int:
    refused, code = ["", ""], 0
    if cluster.refusal_file.exists():
        refused = json.loads(cluster.refusal_file.read_text())
    for document in yaml.safe_load_all(sys.stdin):
        kind, name = document["kind"], document["metadata"]["name"]
        file = cluster.objects / f"{kind} {name}"
        if kind == refused[0]:
            print(refused[1], file=sys.stderr)
            code = 1
        elif verb == "create" and file.exists():
            group = GROUPS.get(kind, f"{kind.lower()}s")
            print(
                f'Error from server (AlreadyExists): error when creating "STDIN": {group} "{name}" '
                "already exists",
                file=sys.stderr,
            )
            code = 1
        elif not is_dry:
            known = json.loads(file.read_text()) if file.exists() else {"metadata": {}}
            uid = known["metadata"].get("uid", str(uuid.uuid4()))
            document["metadata"]["uid"] = uid
            file.write_text(json.dumps(document))
            if as_json:
                print(json.dumps(document, indent=4))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

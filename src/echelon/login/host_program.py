"""The first program on a login node: it makes sure that Echelon's own code is there, and runs it.

Its text is sent with every connection, and needs nothing but Python 3.10. Code lies in
`.echelon/packages/DIGEST` of the project's folder, where DIGEST is that of its content.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

_START = b"\x1eechelon\n"


def main() -> None:
    """Speak with the laptop on standard input and output; what others print goes to stderr."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answers.write(b"\n" + _START)
    hello = json.loads(requests.readline())
    root = Path(os.path.expanduser(hello["root"]))
    package = root / ".echelon" / "packages" / hello["package"]
    os.umask(os.umask(0o022) | 0o022)  # code that a group may write is not trusted
    try:
        if foreign := _find_foreign_folder(package):
            _send(
                answers, {"error": "it belongs to somebody else, or others may write it"} | foreign
            )
            return
        if not package.is_dir():
            _send(answers, {"want": "package"})
            size = json.loads(requests.readline())["size"]
            _unpack(requests.read(size), package)
        (root / "runs").mkdir(exist_ok=True)
        (root / ".echelon").chmod(0o700)  # code may be private, whatever its own folder was
    except OSError as error:
        _send(answers, {"error": f"{error.strerror or error}", "file": str(error.filename or root)})
        return
    _send(answers, {"root": str(root), "host": os.uname().nodename, "python": sys.executable})
    sys.path[:0] = [str(package), str(package / "beside")]
    from echelon.login.host.serve import serve

    serve(requests, answers, root, package)


def _find_foreign_folder(package: Path) -> dict[str, str]:
    """Return a folder of ours in which somebody else could put code; empty if there is none."""
    for folder in (package.parents[1], package.parent, package):
        if folder.is_dir():
            status = folder.stat()
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
                return {"file": str(folder)}
    return {}


def _send(answers: BinaryIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _unpack(archive: bytes, package: Path) -> None:
    """Unpack the code; it has its name when it is whole."""
    partial = package.with_name(f".{package.name}.{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                target = partial / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                if content is not None:
                    target.write_bytes(content.read())
        try:
            partial.rename(package)
        except OSError:
            if not package.is_dir():  # else another connection was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ in ("__main__", "builtins"):
    main()

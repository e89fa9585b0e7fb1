"""The key of a job, by which its agents and ranks know each other on a network of strangers.

Everybody of a job has it in the environment variable ECHELON_KEY, which other users cannot read.
Launchers make a new one for every start: `ssh` sends it over the connection to each host, Slurm's
script makes one when the job begins, `local` gives it to the processes that it forks. With
`launch=env` node 0 writes it into a file (`launch/node/key_agreement.py`), unless the user has set
it on every node; with another launcher than ours only the user can.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from echelon.errors import EchelonError, Fault

KEY_VARIABLE = "ECHELON_KEY"
SUGGESTED_COMMAND = f"{KEY_VARIABLE}=$(openssl rand -hex 32)"
"""Makes a key in a shell, after `export`."""
_MIN_LENGTH = 16


def make_key() -> str:
    """Return a new key."""
    return secrets.token_hex(32)


def read_key(env: Mapping[str, str]) -> str | None:
    """Return the key that the environment has, or None. Raises an EchelonError if it is short
    enough to be guessed."""
    key = env.get(KEY_VARIABLE) or None
    if key is not None and len(key) < _MIN_LENGTH:
        raise EchelonError(
            Fault(
                f"{KEY_VARIABLE} has {len(key)} characters, so it can be guessed",
                f"set it to at least {_MIN_LENGTH} random ones: export {SUGGESTED_COMMAND}",
            )
        )
    return key


def derive_key(key: str, purpose: str) -> bytes:
    """Return a key for one purpose: what was made with it proves nothing for another."""
    return hmac.digest(key.encode(errors="surrogateescape"), purpose.encode(), "sha256")

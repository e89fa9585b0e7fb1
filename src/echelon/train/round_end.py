"""How a rank finds out, in the middle of a loop, that its round is over."""

from __future__ import annotations

import torch.distributed as dist

from echelon.parallel.store import PeerFailedError, StoreLostError
from echelon.runs.failure import SUPERSEDED_ROUND
from echelon.train.step_boundary import RegroupRequested


class RoundLost(BaseException):
    """Ends a user's loop in which another rank was lost. Its cause is the error that this rank met.
    Not an Exception, so that code of the user which catches those does not go on."""


class RankLeft(BaseException):
    """Ends a rank without which the others go on, since its node leaves on purpose."""


def is_round_end(error: BaseException | None) -> bool:
    """Return whether a rank meets such an error when its round is over."""
    if isinstance(error, PeerFailedError):
        return error.failure.summary == SUPERSEDED_ROUND
    is_of_group = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
    return isinstance(error, (RegroupRequested, RoundLost, StoreLostError)) or is_of_group

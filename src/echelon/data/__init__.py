"""Data of any size: files as one Dataset, several of them mixed, and streams.

    echelon.data.open                returns the samples of files as a Dataset, for `train_data`
    echelon.data.open_tokens         returns windows of a file of tokens as a Dataset
    echelon.data.decode_pixels       makes an array of pixels of a picture, for `decode`
    echelon.data.pack_documents      returns documents of tokens, packed into samples of one length
    echelon.data.mix                 returns several Datasets as one, drawn from with weights
    echelon.data.stream              returns data without a length, cut into shards
    echelon.data.TokenBudgetSampler  batches of samples of similar length, for `batch_sampler`

Each of these has its own help page, such as `help(echelon.data.open)`. Everything else in this
package is internal: which sample each rank takes when, and the batches made of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.data.document_packing import pack_documents
    from echelon.data.image_decoding import decode_pixels
    from echelon.data.mixture import mix
    from echelon.data.open_files import open, open_tokens
    from echelon.data.sharded_stream import stream
    from echelon.data.token_budget import TokenBudgetSampler

__all__ = [
    "TokenBudgetSampler",
    "decode_pixels",
    "mix",
    "open",
    "open_tokens",
    "pack_documents",
    "stream",
]

_MODULE_OF = {
    "decode_pixels": "echelon.data.image_decoding",
    "mix": "echelon.data.mixture",
    "open": "echelon.data.open_files",
    "open_tokens": "echelon.data.open_files",
    "pack_documents": "echelon.data.document_packing",
    "stream": "echelon.data.sharded_stream",
    "TokenBudgetSampler": "echelon.data.token_budget",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'echelon.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names, also those not imported yet."""
    return sorted({*globals(), *__all__})

"""A hash of a sample, to compare what ranks were given."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.data.batch_structure import is_container, iter_items

_VALUE_TYPES = (bool, int, float, complex, str, bytes, type(None))


def compute_sample_digest(sample: Any) -> str:
    """Return a hash of the numbers, texts, tensors and arrays in a sample; of anything else only
    its type counts, as two equal objects need not look alike."""
    digest = hashlib.blake2b(digest_size=8)
    _add_node(sample, digest)
    return digest.hexdigest()


def _add_node(node: Any, digest: Any) -> None:
    digest.update(type(node).__qualname__.encode())
    if isinstance(node, Tensor) and node.layout is torch.strided and not node.is_quantized:
        dense = node.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{node.dtype} {tuple(node.shape)}".encode())
        digest.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(node, np.ndarray) and not node.dtype.hasobject:
        digest.update(f"{node.dtype} {node.shape}".encode())
        digest.update(node.tobytes())
    elif isinstance(node, _VALUE_TYPES):
        digest.update(repr(node).encode())
    elif is_container(node):
        for key, value in iter_items(node):
            _add_node(key, digest)
            _add_node(value, digest)

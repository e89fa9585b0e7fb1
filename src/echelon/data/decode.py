"""From the bytes of a sample to values: pictures, arrays, JSON, text, class numbers.

Decoding happens where samples are fetched, so in loader processes if there are some. What a column
is, its name says: an extension of a tar member (`jpg`, `seg.png`), or `image`. Values that are no
bytes, such as numbers of a table, stay as they are.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from echelon.data.formats.reader import BadSampleError, SamplePlace, SampleReader
from echelon.data.image_decoding import PICTURE_STARTS, decode_image, decode_pixels
from echelon.errors import EchelonError, Fault

DecodeValue = Callable[[Any], Any]
"""Takes what is stored in a column and returns what the sample is to have."""
DecodeSetting = (
    Literal["auto"] | None | Callable[[str, Any], Any] | Mapping[str, DecodeValue | None]
)
"""What `echelon.data.open` takes as `decode`; see SampleDecoder."""

_PICKLES = ("pkl", "pickle", "pt", "pth", "pyd")


class SampleDecoder:
    """Decodes the columns of samples.

    ``decode`` is one of:

    * ``"auto"``: by the name of the column, and bytes of other names stay bytes
    * ``None``: everything stays as it is stored
    * a function of the column's name and its value
    * a dict from columns to functions of the value, or to None to keep it; the other columns are
      decoded as with ``"auto"``

    Raises EchelonError for what cannot be decoded at all: pickles, which could run any code, and
    pictures where pillow is not installed.
    """

    def __init__(
        self,
        decode: DecodeSetting,
        column_names: Iterable[str],
        encoded_columns: Sequence[str] = (),
    ) -> None:
        self._function = decode if callable(decode) else None
        self._by_column: dict[str, DecodeValue] = {}
        if decode is None or callable(decode):
            return
        chosen = {} if decode == "auto" else decode
        if not isinstance(chosen, Mapping):
            what = f"decode is {decode!r}"
            raise EchelonError(Fault(what, 'give "auto", None, a function or a dict of functions'))
        names = [*column_names]
        faults = [
            Fault(f"decode has {name!r}, which is not a column", f"columns: {', '.join(names)}")
            for name in chosen
            if name not in names
        ]
        for name in names:
            if name in chosen:
                function = chosen[name]
                faults += _find_missing_pillow(name, function)
            else:
                is_encoded = name in encoded_columns
                function = _AUTO.get(
                    _get_extension(name), _decode_if_picture if is_encoded else None
                )
                faults += _find_faults(name, function)
            if function is not None:
                self._by_column[name] = function
        if faults:
            raise EchelonError(*dict.fromkeys(faults))

    @property
    def leaves_numbers(self) -> bool:
        """Whether all that is not bytes stays as it is, and no function of the user's is called."""
        known = (*_AUTO.values(), _decode_if_picture, decode_pixels)
        return self._function is None and all(f in known for f in self._by_column.values())

    def decode_sample(
        self, sample: dict[str, Any], locate: Callable[[], SamplePlace]
    ) -> dict[str, Any]:
        """Return a sample with decoded values. Raises BadSampleError, at the place ``locate``
        returns, for whatever a function raises."""
        decoded = dict(sample)
        for column, value in sample.items():
            try:
                if self._function is not None:
                    decoded[column] = self._function(column, value)
                elif column in self._by_column:
                    decoded[column] = self._by_column[column](value)
            except (EchelonError, BadSampleError):
                raise
            except Exception as error:
                why = str(error) or type(error).__name__
                raise BadSampleError(locate(), f"{column} cannot be decoded: {why}") from error
        return decoded


def make_decoder(decode: DecodeSetting, reader: SampleReader) -> SampleDecoder:
    """Return the decoder for the columns of a reader. Of columns with files in them, as Hugging
    Face stores pictures in tables, those that are pictures are decoded whatever their name is."""
    return SampleDecoder(decode, reader.column_names, getattr(reader, "encoded_columns", ()))


def list_opaque_columns(column_names: Iterable[str]) -> list[str]:
    """Return the columns of pictures and of pickles, whose bytes are not for reading."""
    opaque = [*_PICKLES, *(name for name, each in _AUTO.items() if each is decode_image)]
    return [name for name in column_names if _get_extension(name) in opaque]


def _get_extension(column: str) -> str:
    return column.rpartition(".")[2].lower()


def _find_faults(column: str, function: DecodeValue | None) -> list[Fault]:
    if _get_extension(column) in _PICKLES:
        return [
            Fault(
                f"the column {column!r} is pickled, and loading a pickle may run any code in it",
                f"decode it yourself with decode={{{column!r}: load}}, where load calls "
                "torch.load(…, weights_only=True); or leave it out with columns=[…]",
            )
        ]
    return _find_missing_pillow(column, function)


def _find_missing_pillow(column: str, function: DecodeValue | None) -> list[Fault]:
    if function in (decode_image, decode_pixels) and find_spec("PIL") is None:
        return [
            Fault(
                f"the column {column!r} has pictures, and pillow is not installed",
                "pip install 'echelon[data]', or keep the bytes with decode=None",
            )
        ]
    return []


def _decode_if_picture(value: Any) -> Any:
    """Return a picture of a column whose name says nothing; a sound stays as it is."""
    data = value.get("bytes") if isinstance(value, Mapping) else None
    is_picture = isinstance(data, bytes) and data.startswith(PICTURE_STARTS)
    return decode_image(value) if is_picture else value


def _decode_array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _decode_arrays(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8")


def _decode_if_bytes(function: Callable[[bytes], Any], value: Any) -> Any:
    """Return what is not bytes as it is: a table has values of its own."""
    return function(value) if isinstance(value, bytes) else value


_AUTO: dict[str, DecodeValue] = {
    **dict.fromkeys(
        ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "image"),
        decode_image,
    ),
    **dict.fromkeys(("txt", "text"), partial(_decode_if_bytes, _decode_text)),
    "npy": partial(_decode_if_bytes, _decode_array),
    "npz": partial(_decode_if_bytes, _decode_arrays),
    "json": partial(_decode_if_bytes, json.loads),
    "cls": partial(_decode_if_bytes, int),
}

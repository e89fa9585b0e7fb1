"""Which columns are read, and whether all files have them, of the same types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.data.formats.byte_source import DataPath
from echelon.errors import EchelonError, Fault, suggest_nearest

MAX_FAULTS = 20
"""Of ten thousand files that are all wrong, some are enough."""


def choose_columns(
    files: Sequence[DataPath], types: Sequence[Mapping[str, str]], chosen: Sequence[str] | None
) -> list[str]:
    """Return the chosen columns in the order in which they were chosen, or all of the first file.
    `types` has the columns of every file. Raises for every file that lacks a chosen one."""
    if chosen is None:
        return list(types[0])
    faults = [
        Fault(f"columns has {name!r}, which {file} does not have", suggest_nearest(name, own))
        for file, own in zip(files, types, strict=True)
        for name in chosen
        if own and name not in own
    ]
    raise_faults(faults)
    return list(chosen)


def check_same_names(paths: Sequence[DataPath], types: Sequence[Mapping[str, str]]) -> None:
    """Raises for every file that has other columns than the first."""
    faults = []
    for path, own in zip(paths, types, strict=True):
        lacks = [name for name in types[0] if name not in own]
        adds = [name for name in own if name not in types[0]]
        if lacks or adds:
            common = [name for name in types[0] if name in own]
            found = [f"it has no {name!r}" for name in lacks] + [
                f"it has {name!r}" for name in adds
            ]
            what = f"{path} has other columns than {paths[0]}: {', '.join(found[:5])}"
            faults.append(Fault(what, f"choose from those that all have: columns={common}"))
    raise_faults(faults)


def check_same_types(
    files: Sequence[DataPath], types: Sequence[Mapping[str, str]], columns: Sequence[str]
) -> None:
    """Raises for every file in which a column has another type than in the first file that has
    it. A type that is not known is empty."""
    faults = []
    for name in columns:
        known = [(file, own[name]) for file, own in zip(files, types, strict=True) if own.get(name)]
        faults += [
            Fault(
                f"column {name!r} is {other} in {file} and {known[0][1]} in {known[0][0]}",
                "write the files anew with one type, or open them apart",
            )
            for file, other in known[1:]
            if other != known[0][1]
        ]
    raise_faults(faults)


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raises an error with these faults, if there are any; of very many, the first ones."""
    if not faults:
        return
    shown = list(faults[:MAX_FAULTS])
    if more := len(faults) - len(shown):
        shown.append(Fault(f"{more:,} more of the files are wrong", "fix those above first"))
    raise EchelonError(*shown)

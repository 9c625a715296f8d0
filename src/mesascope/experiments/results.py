"""Numbers behind figures: named arrays with named axes, kept as npz and json."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesascope import store
from mesascope.analysis.results import Estimate
from mesascope.experiments.panels import Origin
from mesascope.store import unknown
from mesascope.untrusted import StoreError, check, read_npz


class Named(NamedTuple):
    """An array and the names of its axes; "seed", where there is one, is the first."""

    values: np.ndarray
    axes: tuple[str, ...]

    @classmethod
    def of(cls, values: Any, *axes: str) -> "Named":
        """Checked, and as numpy has it."""
        values = np.asarray(values)
        if values.ndim != len(axes) or "seed" in axes[1:]:
            raise ValueError(f"axes: expected {values.ndim} names, 'seed' only as the first, got {axes}.")
        return cls(values, axes)

    @classmethod
    def estimate(cls, found: Estimate) -> "Named":
        """The values by seed of what a tool of the scope found."""
        return cls.of(found.values, *found.axes)


Arrays = dict[str, Named]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """All arrays of a figure.

    Attributes:
        origin: for each array, whether it was computed just now or comes with the repository.
        about: by piece, how it was made.
    """

    figure: str
    arrays: Mapping[str, Named]
    origin: Mapping[str, Origin]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise KeyError(unknown("array", name, self.arrays))
        return self.arrays[name].values

    def __contains__(self, name: str) -> bool:
        return name in self.arrays


def files(path: Path) -> tuple[Path, Path]:
    """The arrays of a name, which may have dots in it, and what is said about them."""
    return path.with_name(f"{path.name}.npz"), path.with_name(f"{path.name}.json")


def write(path: Path, arrays: Mapping[str, Named], about: Mapping[str, Any]) -> None:
    """`path`.npz and `path`.json; the second last, so that a pair that is there is whole."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{name: array.values for name, array in arrays.items()})  # pyright: ignore
    numbers, about_them = files(path)
    store.write(numbers, buffer.getvalue())
    axes = {name: list(array.axes) for name, array in arrays.items()}
    store.write_json(about_them, {"axes": axes, **about})


_PIECE = {"arrays?": [str], "inputs?": {str: str}, "seconds?": float, "made?": {str: object}}


def read(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """What `write` wrote.

    Raises:
        StoreError: it is missing or damaged.
    """
    numbers, written = files(path)
    form = _PIECE | {"axes": {str: [str]}, "pieces?": {str: _PIECE}}
    about = check(store.read_json(written), form, written)
    axes = about.pop("axes")
    found = read_npz(numbers, axes)
    try:
        return {name: Named.of(values, *axes[name]) for name, values in found.items()}, about
    except ValueError as error:
        raise StoreError(f"{written} does not fit {numbers.name} ({str(error)[:500]}).") from error


def spliced(
    stored: Mapping[str, Named], recomputed: Mapping[str, Named], seed: int = 0
) -> tuple[Arrays, dict[str, Origin]]:
    """Stored arrays of all seeds in which one seed, and what has no seeds, is as it was computed again; and which are.

    Raises:
        StoreError: they do not fit each other.
    """
    whole, origin = dict(stored), dict[str, Origin](dict.fromkeys(stored, "stored"))
    for name, new in recomputed.items():
        old = stored.get(name)
        if old is None or "seed" not in new.axes or len(old.values) == len(new.values):
            whole[name], origin[name] = new, "recomputed"
            continue
        if old.axes != new.axes or old.values.shape[1:] != new.values.shape[1:]:
            raise StoreError(
                f"{name}: expected the form of the stored array, {old.axes} {old.values.shape} but for seeds, got "
                f"{new.axes} {new.values.shape}: it is made otherwise now, and is to be computed and published anew."
            )
        values = np.array(old.values)
        values[seed] = new.values[0]
        whole[name], origin[name] = Named(values, old.axes), "one seed recomputed"
    return whole, origin

"""Activations under their addresses: seen and edited on their way."""

from collections.abc import Callable, Mapping

from jax import Array

Edit = Callable[[Array], Array]


class Tap:
    """Passes activations on, edited if somebody asked for it, and remembers them if somebody wants them."""

    def __init__(self, edit: Mapping[str, Edit], record: bool):
        self.edit, self.record = edit, record
        self.seen: dict[str, Array] = {}
        self.met: set[str] = set()

    def __call__(self, path: str, value: Array) -> Array:
        self.met.add(path)
        if path in self.edit:
            value = self.edit[path](value)
        if self.record:
            self.seen[path] = value
        return value

    def note(self, path: str, value: Callable[[], Array], *, editable: bool = False) -> None:
        """Something the model itself does not need, unless (where it is editable) somebody edits it."""
        if editable:
            self.met.add(path)
        if self.record:
            self.seen[path] = value()

    def check(self) -> None:
        for path in self.edit:
            if path not in self.met:
                raise KeyError(
                    f"edit: no activation {path!r} to be edited. There are: {', '.join(sorted(self.met))}."
                )

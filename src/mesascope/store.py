"""Files that are whole or absent: atomic writes, named arrays with a checksum, configurations as JSON."""

import difflib
import fcntl
import hashlib
import json
import math
import os
import reprlib
import time
import types
import typing
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save

from mesascope.untrusted import StoreError, check, map_safetensors, parse_json
from mesascope.untrusted import read_json as read_json

T = TypeVar("T")
SECONDS_FOR_A_LOOK = 1.0


def unknown(what: str, name: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """What to say about a name that is not among those known."""
    near = difflib.get_close_matches(name, list(known), n=4, cutoff=0.3)
    if near:
        return f"{what}: there is no {name!r}. The nearest are: {', '.join(near)}."
    return f"{what}: there is no {name!r}. There are: {', '.join(known)}."


def write(path: Path, content: bytes) -> None:
    """All of it or nothing: whoever reads sees the old file or the new one, also after a crash."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise StoreError(
            f"could not write {path}: {error.strerror}. What was there before is untouched."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def keep_as(path: Path, name: Path) -> None:
    """The file under another name too; what is written to its own name next leaves that one as it is."""
    temporary = _temporary(name)
    try:
        os.link(path, temporary)
        os.replace(temporary, name)
    except OSError:  # a file system without links
        write(name, path.read_bytes())
    finally:
        temporary.unlink(missing_ok=True)  # it stays where both names are one file already


def _temporary(path: Path) -> Path:
    """Of no other process, not even one of the same number on another machine."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def locked(
    folder: Path,
    *,
    field: str,
    doing: str,
    error: type[Exception] = StoreError,
    busy: type[Exception] | None = None,
) -> Iterator[None]:
    """Two processes must not write to one folder. The lock ends with the process that holds it.

    Args:
        field: what the caller named the folder with, for the message.
        doing: "trained", "prepared": what the other process does.
        error: what to raise when nothing can be written there.
        busy: what to raise when another process holds the lock; the same unless given.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as cause:
        raise error(f"{field}: cannot write to {folder}: {cause.strerror}.") from cause
    try:
        if not _lock(file):
            raise (busy or error)(f"{folder} is being {doing} by another process.")
        yield
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Whoever asks `is_locked` has it for a moment too: so not at the first refusal."""
    until = time.monotonic() + SECONDS_FOR_A_LOOK
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        else:
            return True


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder."""
    try:
        file = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def write_json(path: Path, content: Any) -> None:
    write(path, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


# Arrays.


def write_arrays(path: Path, tree: Any, **metadata: str) -> None:
    """A tree of arrays, each under the path of its leaf: `layers.0.queries`."""
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in _named(tree).items()}
    # One entry, for safetensors writes several in an order of its own: the same arrays are to be the same bytes.
    sums = {"sha256": _checksum(arrays), "sha256_of_metadata": _metadata_checksum(metadata)}
    header = json.dumps(metadata | sums, sort_keys=True)
    write(path, save(arrays, {"mesascope": header}))


def read_metadata(path: Path) -> dict[str, str]:
    """Of a file that `write_arrays` wrote. It has a checksum of its own: the arrays are not read."""
    return map_arrays(path)[1]


def read_named(path: Path, *, largest: int = 2**28) -> dict[str, np.ndarray]:
    """The arrays of a file that `write_arrays` wrote, by the paths of their leaves.

    Args:
        largest: how many bytes they may have together. A file of holes has any length and takes no room.
    """
    return {name: np.array(array) for name, array in _sound(path, largest).items()}


def check_arrays(path: Path, *, largest: int) -> None:
    """Compare arrays of at most so many bytes with their checksum."""
    _sound(path, largest)


def _sound(path: Path, largest: int) -> dict[str, np.ndarray]:
    arrays, metadata = map_arrays(path)
    size = sum(array.nbytes for array in arrays.values())
    if size > largest:
        raise StoreError(f"{path}: expected at most {largest:,} bytes of arrays, got {size:,}.")
    _check_sum(path, arrays, metadata)
    return arrays


def read_arrays(path: Path, like: T, *, any_float: bool = False) -> T:
    """The arrays back in a tree like the one given (of arrays or of shapes); with `any_float`, of any precision."""
    arrays, metadata = map_arrays(path)
    wanted = _named(like)
    for name in sorted(wanted.keys() ^ arrays.keys()):
        whose = "is missing" if name in wanted else "is not expected"
        raise StoreError(
            f"{path}: the array {reprlib.repr(name)} {whose}. Is it of another model or another version?"
        )
    for name, leaf in wanted.items():
        expected, got = (leaf.shape, leaf.dtype), (arrays[name].shape, arrays[name].dtype)
        if expected != got and not (any_float and expected[0] == got[0] and _is_float(got[1])):
            raise StoreError(f"{path}: {name!r} is {got}, expected {expected}. Is it of another model?")
    _check_sum(path, arrays, metadata)
    return jax.tree.unflatten(jax.tree.structure(like), [np.array(arrays[name]) for name in wanted])


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def map_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays, mapped into memory and not compared with their checksum, and what was written about them."""
    arrays, about = map_safetensors(path)
    metadata = check(parse_json(about.get("mesascope", "{}"), path), {str: str}, f"{path}, metadata")
    if "sha256" not in metadata:
        raise StoreError(f"{path} has no checksum: it was written by something else, or by another version.")
    sha256 = metadata.pop("sha256_of_metadata", None)  # files of the first versions have none
    if sha256 is not None and sha256 != _metadata_checksum(metadata):
        raise StoreError(f"{path} is damaged: its header does not fit its checksum.")
    return arrays, metadata


def _check_sum(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    if metadata["sha256"] != _checksum(arrays):
        raise StoreError(f"{path} is damaged: its contents do not fit its checksum.")


def _named(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _metadata_checksum(metadata: Mapping[str, str]) -> str:
    rest = {name: value for name, value in metadata.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# Configurations.


def to_dict(value: Any) -> Any:
    """A frozen dataclass as JSON data: every one of them carries the name of its kind."""
    return _to_dict(value, all_fields=True)


def _to_dict(value: Any, *, all_fields: bool) -> Any:
    if is_dataclass(value):
        kept = [f for f in fields(value) if all_fields or not _is_later_default(value, f)]
        return {"kind": type(value).__name__} | {
            f.name: _to_dict(getattr(value, f.name), all_fields=all_fields) for f in kept
        }
    if isinstance(value, tuple):
        return [_to_dict(v, all_fields=all_fields) for v in value]
    return value


def _is_later_default(value: Any, of: Field) -> bool:
    return bool(of.metadata.get("later")) and getattr(value, of.name) == of.default


def later(default: Any) -> Any:
    """A field that did not exist when configurations had already been stored: while it has its default, their digests,
    and so the names of their runs, are what they were."""
    return field(default=default, metadata={"later": True})


def check_numbers(config: Any, *, positive: Sequence[str] = (), **at_least: float) -> None:
    """For the `__post_init__` of a configuration: its numbers are finite, and these as large as they must be.

    Raises:
        ValueError: one is not.
    """
    for name, value in ((f.name, getattr(config, f.name)) for f in fields(config)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}.")
        if name in positive and not value > 0:
            raise ValueError(f"{name}: expected more than 0, got {value}.")
        if name in at_least and value < at_least[name]:
            raise ValueError(f"{name}: expected at least {at_least[name]:g}, got {value}.")


def from_dict(data: Any, root: type[T]) -> T:
    """The dataclass back. Fields that did not exist yet take their defaults."""
    value = _revive(data, _kinds(root))
    if not isinstance(value, root):
        raise StoreError(f"expected a {root.__name__}, got {type(value).__name__}.")
    return value


def with_field(config: T, *assignments: str) -> T:
    """The configuration with fields set: `model.blocks.1.mixer=Linear`, or any JSON after the equals sign.

    A word that is no JSON names a kind, with its default fields, or is a string. What several fields make together must
    be valid, not what each makes alone.
    """
    data = to_dict(config)
    for assignment in assignments:
        _assign(data, assignment, _kinds(type(config)))
    return from_dict(data, type(config))


def _assign(data: Any, assignment: str, kinds: Mapping[str, type]) -> None:
    path, equals, text = assignment.partition("=")
    place: Any = data
    *way, last = (int(name) if name.isdigit() else name for name in path.split("."))
    try:
        for name in way:
            place = place[name]
        place[last]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"set: the configuration has no field {path!r}.") from error
    if not equals or last == "kind":
        raise ValueError(f"set: expected FIELD=VALUE, got {assignment!r}.")
    try:
        value = parse_json(text, path)
    except StoreError:
        value = {"kind": text} if text in kinds else text
    place[last] = value


def choices(config: Any, path: str = "") -> dict[str, list[str]]:
    """Fields of a configuration that may be of several kinds, by path (N for a number): the names of these, and null
    for none."""
    found: dict[str, list[str]] = {}
    if isinstance(config, tuple):
        for item in config:
            found |= choices(item, f"{path}.N")
    if not is_dataclass(config):
        return found
    for name, hint in typing.get_type_hints(type(config)).items():
        where = f"{path}.{name}".lstrip(".")
        options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()
        kinds = [option.__name__ for option in options if is_dataclass(option) and isinstance(option, type)]
        if kinds:
            found[where] = kinds + ["null"] * (types.NoneType in options)
        found |= choices(getattr(config, name), where)
    return found


def digest(config: Any) -> str:
    """Ten hexadecimal digits that tell configurations apart."""
    canonical = json.dumps(_to_dict(config, all_fields=False), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def _revive(data: Any, kinds: Mapping[str, type]) -> Any:
    if isinstance(data, list):
        return tuple(_revive(v, kinds) for v in data)
    if not isinstance(data, dict):
        return data
    name = data.get("kind")
    if not isinstance(name, str) or name not in kinds:
        raise StoreError(f"no kind {reprlib.repr(name)} is known here. Was it written by another version?")
    kind = kinds[name]
    given = {name: _revive(v, kinds) for name, v in data.items() if name != "kind"}
    unknown = sorted(given.keys() - {f.name for f in fields(kind)})
    if unknown:
        raise StoreError(
            f"{kind.__name__} has no field {reprlib.repr(unknown[0])}. Was it written by another version?"
        )
    hints = typing.get_type_hints(kind)
    given = {name: _fitted(value, hints[name], f"{kind.__name__}.{name}") for name, value in given.items()}
    try:
        return kind(**given)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise StoreError(f"not a valid {kind.__name__}: {str(error)[:500]}") from error


def _fitted(value: Any, hint: Any, where: str) -> Any:
    """The value, if it is of that type; whole numbers become floats where floats are meant."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if origin is typing.Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, tuple):
            item = typing.get_args(option)[0]
            return tuple(_fitted(v, item, where) for v in value)
        if isinstance(option, type) and origin is None:
            if type(value) is option or (is_dataclass(option) and isinstance(value, option)):
                return value
            if option is float and type(value) is int:
                return float(value)
    wanted = str(getattr(hint, "__name__", hint)).replace("typing.", "")
    raise StoreError(f"{where}: expected {wanted}, got {reprlib.repr(value)}.")


def _kinds(root: type) -> dict[str, type]:
    """All dataclasses that the fields of `root` can hold, by name."""
    found: dict[str, type] = {}

    def visit(hint: Any) -> None:
        if typing.get_origin(hint) in (Union, types.UnionType, tuple):
            for part in typing.get_args(hint):
                visit(part)
        elif isinstance(hint, type) and is_dataclass(hint) and hint.__name__ not in found:
            found[hint.__name__] = hint
            for part in typing.get_type_hints(hint).values():
                visit(part)

    visit(root)
    return found

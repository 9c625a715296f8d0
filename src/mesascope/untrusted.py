"""Files that anybody may have written: what they declare is held against what they are before anything is allocated.

JSON, safetensors and npz come out of here as plain values or as a `StoreError`; never as code that runs. What they may
cost is in docs/fuzz.md.
"""

import json
import math
import os
import re
import reprlib
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

# Of a document; its values may take 30 times as much memory. Longer are, for good reasons, only a corpus's index, and
# metrics, which are a document per line.
LONGEST_JSON = 2**22
LONGEST_INDEX = 2**24
LONGEST_METRICS = 2**25
DEEPEST_JSON = 64
# What an archive may unpack to, whatever its size; beyond, so many times its size; and never more.
SMALL_ARCHIVE = 2**26
LARGEST_RATIO = 100
LARGEST_ARCHIVE = 2**30

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64,
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip


class StoreError(RuntimeError):
    """A file that cannot be written, or is not what it should be."""


def is_plain_name(name: str) -> bool:
    """Whether a file or folder of that name lies where it is put: no separators, no dot in front."""
    return re.fullmatch(r"[^\W_.][\w.+-]{0,199}", name) is not None


# JSON.


def read_json(path: Path, longest: int = LONGEST_JSON) -> Any:
    """A JSON file: at most 4 MiB and 64 levels deep, of finite numbers and of names that are there once."""
    return parse_json(read_bytes(path, longest), path)


def read_bytes(path: Path, longest: int) -> bytes:
    """A file that is no longer than that."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > longest:
                raise StoreError(f"{path}: expected at most {longest:,} bytes, got {size:,}.")
            return file.read(size)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}).") from error


def open_regular(path: Path) -> BinaryIO:
    """A file to be read. Opening a pipe would wait for somebody to write to it, and a device may have no end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StoreError(f"{path}: expected a regular file, not a pipe or a device.")
    return file


def parse_json(content: bytes | str, where: Any) -> Any:
    """What `read_json` reads, from memory."""
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(
            text,
            parse_constant=_no_number,
            parse_float=_finite,
            parse_int=_moderate,
            object_pairs_hook=_unique,
        )
        if _is_deeper(value, DEEPEST_JSON):
            raise ValueError(f"more than {DEEPEST_JSON} levels")
        if _SURROGATE.search(text):  # half of a pair is no character, and nobody could write it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where}: expected JSON, but it is damaged ({str(error)[:500]}).") from error
    return value


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError("a number is too large")
    return value


def _moderate(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (value := int(text)) < 2**63:
        raise ValueError("a whole number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is there twice")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is not None and (levels == 0 or any(_is_deeper(part, levels - 1) for part in parts))


def check(value: Any, form: Any, where: Any) -> Any:
    """The value, if it has that form.

    Args:
        form: `int`, `float` (also whole numbers), `str`, `bool`, `None` or `object` (anything); a tuple of forms, of
            which one must fit; `[form]` for a list; `{"name": form}` for what an object must have, among other things
            (`"name?"`: if it has it); `{str: form}` for an object of any names.

    Raises:
        StoreError: which part of it does not.
    """
    if isinstance(form, tuple):
        for option in form[:-1]:
            try:
                return check(value, option, where)
            except StoreError:
                continue
        return check(value, form[-1], where)
    if isinstance(form, list):
        if type(value) is not list:
            raise _unfit(value, "a list", where)
        for i, part in enumerate(value):
            check(part, form[0], f"{where}, {i}")
    elif isinstance(form, dict):
        if type(value) is not dict:
            raise _unfit(value, "an object", where)
        for name, part in form.items():
            if name is str:
                for key, each in value.items():
                    check(each, part, f"{where}, {reprlib.repr(key)}")
            elif (plain := name.removesuffix("?")) in value:
                check(value[plain], part, f"{where}, {plain!r}")
            elif name == plain:
                raise StoreError(f"{where}: {name!r} is missing.")
    elif form is None:
        if value is not None:
            raise _unfit(value, "null", where)
    elif form is not object and type(value) not in ((int, float) if form is float else (form,)):
        raise _unfit(value, f"a value of type {form.__name__}", where)
    return value


def _unfit(value: Any, expected: str, where: Any) -> StoreError:
    return StoreError(f"{where}: expected {expected}, got {reprlib.repr(value)}. Is it damaged?")


# Arrays.


def map_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a safetensors file, mapped into memory and not read; and its metadata.

    (Such a file is the length of a header in eight bytes, the header, and the arrays.)
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size - 8 - length
            if size < 0 or length > LONGEST_JSON:
                raise StoreError(f"{path} is damaged: it says that its header has {length:,} bytes.")
            header = check(parse_json(file.read(length), path), {str: object}, path)
            mapped = np.memmap(file, np.uint8, "r", offset=8 + length) if size else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise StoreError(f"{path}: there is no such file.") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read ({error}).") from error
    metadata = check(header.pop("__metadata__", {}), {str: str}, f"{path}, metadata")
    form = {"dtype": str, "shape": [int], "data_offsets": [int]}
    for name, about in header.items():
        check(about, form, f"{path}, {reprlib.repr(name)}")
    arrays, end, content = {}, 0, np.asarray(mapped)
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
        itemsize = np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else -1
        # Python's integers do not wrap around.
        if (
            itemsize < 0
            or len(shape) > 32
            or any(n < 0 for n in shape)
            or math.prod(max(n, 1) for n in shape) >= 2**60
            or offsets != [end, end + itemsize * math.prod(shape)]
            or offsets[1] > size
        ):
            told = f"{reprlib.repr(dtype)} of shape {reprlib.repr(shape)} at {reprlib.repr(offsets)}"
            raise StoreError(f"{path} is damaged: {reprlib.repr(name)} cannot be {told}.")
        end = offsets[1]
        arrays[name] = content[offsets[0] : end].view(DTYPES[dtype]).reshape(shape)
    if end != size:
        raise StoreError(f"{path} is damaged: {size - end:,} bytes belong to nothing.")
    return {name: arrays[name] for name in header}, metadata


def read_npz(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The arrays of these names from a file of `np.savez`: numbers only, and never a pickle."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            limit = min(max(SMALL_ARCHIVE, LARGEST_RATIO * size), LARGEST_ARCHIVE)
            wanted, total = {}, 0
            for name in names:
                info = archive.getinfo(f"{name}.npy")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
                    raise ValueError(f"{reprlib.repr(name)} is packed in an unusual way")
                total += info.file_size
                wanted[name] = info
            if total > limit:
                raise ValueError(f"it would unpack to {total:,} bytes")
            return {name: _read_npy(archive, info) for name, info in wanted.items()}
    except StoreError:
        raise
    except _ZIP_ERRORS as error:
        raise StoreError(f"{path} is missing or damaged ({str(error)[:200]}).") from error


# All that zipfile raises for files that are none.
_ZIP_ERRORS = (
    OSError, ValueError, LookupError, EOFError, ArithmeticError, RuntimeError, struct.error,
    zlib.error, zipfile.BadZipFile,
)  # fmt: skip

# As numpy writes it. (Its own reader evaluates a literal.)
_NPY_HEADER = re.compile(
    r"\{'descr': '([<|][biufc]\d{1,2})', 'fortran_order': (False|True), 'shape': \(((?:\d{1,15},? ?)*)\), \} *\n"
)


def _read_npy(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(info) as file:
        start = file.read(10)
        header = file.read(int.from_bytes(start[8:], "little"))
        match = _NPY_HEADER.fullmatch(header.decode("latin1"))
        if start[:8] != b"\x93NUMPY\x01\x00" or match is None:
            raise ValueError(f"{reprlib.repr(info.filename)} is no array of numbers")
        try:
            dtype = np.dtype(match[1])
        except TypeError as error:
            raise ValueError(str(error)) from error
        shape = tuple(int(n) for n in match[3].replace(" ", "").split(",") if n)
        size = dtype.itemsize * math.prod(shape)
        if len(start) + len(header) + size != info.file_size or len(shape) > 32:
            raise ValueError(f"{reprlib.repr(info.filename)} is not of shape {reprlib.repr(shape)}")
        # One byte more than there should be, so that the end, and with it the checksum, is met.
        content = file.read(size + 1)
    if len(content) != size:
        raise ValueError(f"{reprlib.repr(info.filename)} is cut off")
    # A copy, for nothing can be written to what lies in bytes.
    return np.frombuffer(content, dtype).reshape(shape, order="F" if match[2] == "True" else "C").copy("K")

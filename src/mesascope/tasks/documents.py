"""Documents out of files: the Pile's `*.jsonl.zst`, plain `*.jsonl`, and `*.txt`, one document per file.

What cannot be read does not stop the rest and does not vanish: every line that is not a whole document comes out as a
`Document` with a `problem`.
"""

import codecs
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mesascope.store import StoreError

SUFFIXES = (".jsonl.zst", ".jsonl", ".txt")
LONGEST_LINE = 2**28
# Small, for what a piece unpacks to is in memory at once: 128 KiB for every 4 bytes in the worst case.
ARCHIVE_PIECE = 2**13
_SPLIT = re.compile(r"(?:(?P<validation>val|valid|validation|dev)|(?P<test>test))(?:[-_.]|$)")


class Source(NamedTuple):
    """A file of a corpus.

    Attributes:
        name: what it is called in messages: its path below the folder that was given.
        split: what it is for: `train`, `validation` or `test`.
        part: of the corpus, for documents that do not name theirs: the name of the file's folder.
    """

    path: Path
    name: str
    split: str
    part: str


class Document(NamedTuple):
    """A document, or a place where there should have been one.

    Attributes:
        text: empty where nothing could be read.
        part: of the corpus: its `meta.pile_set_name`, or else that of its source.
        line: in its file, from 1.
        problem: what is wrong with it, or nothing.
        position: how many bytes of the file had been read.
    """

    text: str
    part: str
    line: int
    problem: str
    position: int


def find_sources(data: Sequence[Path]) -> tuple[list[Source], list[str]]:
    """The files of a corpus, and the names of those in its folders that are of no kind known here.

    Files and folders called val…, valid…, validation… or dev… are for validation, test… for tests, the others for
    training.
    """
    sources, ignored = [], []
    for root in data:
        if not root.exists():
            raise ValueError(f"data: there is no {root}.")
        if root.is_file() and not root.name.endswith(SUFFIXES):
            raise ValueError(
                f"data: expected {', '.join('*' + s for s in SUFFIXES)} or a folder, got {root}."
            )
        for path in [root] if root.is_file() else _files(root):
            parts = (path.name,) if root.is_file() else path.relative_to(root).parts
            if path.name.endswith(SUFFIXES):
                folder = path.resolve().parent.name
                sources.append(Source(path, "/".join(parts), _split(parts), folder))
            else:
                ignored.append("/".join(parts))
    if not sources:
        kinds = ", ".join("*" + suffix for suffix in SUFFIXES)
        raise ValueError(f"data: there is no {kinds} in {', '.join(map(str, data))}.")
    return sources, ignored


def _files(folder: Path) -> list[Path]:
    found = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _split(parts: Sequence[str]) -> str:
    for part in parts:
        if (match := _SPLIT.match(part)) is not None:
            return str(match.lastgroup)
    return "train"


def read_documents(source: Source, from_line: int = 1) -> Iterator[Document]:
    """The documents of a file in their order; empty lines are passed over.

    Args:
        from_line: lines before this one are not looked at.
    """
    part, line = source.part, 0
    try:
        with source.path.open("rb") as file:
            if source.path.name.endswith(".txt"):
                if from_line == 1:
                    content = file.read()
                    yield _document(*_decoded(content), part=part, line=1, position=len(content))
                return
            if source.path.name.endswith(".zst"):
                lines = io.BufferedReader(_Archive(file), 2**20)
            else:
                lines = file
            for line, content in enumerate(_lines(lines), start=1):
                if line < from_line or (content is not None and not content.strip()):
                    continue
                if content is None:
                    yield Document("", part, line, f"longer than {LONGEST_LINE >> 20} MiB", file.tell())
                else:
                    yield _parsed(content, part, line, file.tell())
    except (OSError, EOFError) as error:
        # After the last line that could be read; so it is met again by whoever goes on from an earlier one.
        what = str(error) if isinstance(error, EOFError) else f"cannot be read ({error.strerror})"
        yield Document("", part, line + 1, what, 0)


def _lines(file: BinaryIO | io.BufferedReader) -> Iterator[bytes | None]:
    """Lines; None for one that is too long to be held."""
    while content := file.readline(LONGEST_LINE):
        if len(content) == LONGEST_LINE and not content.endswith(b"\n"):
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            yield content


class _Archive(io.RawIOBase):
    """What a zstd archive unpacks to, also of several frames. EOFError, at its place, if the archive is damaged or cut.

    (The library's own stream ends without a word where an archive is cut.)
    """

    def __init__(self, file: BinaryIO):
        try:
            import zstandard
        except ImportError as error:
            raise StoreError("*.jsonl.zst: needs `pip install mesascope[text]`.") from error
        self.file, self.error = file, zstandard.ZstdError
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
        self.frame: Any = self.unpacker.decompressobj()
        self.packed, self.unpacked = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self.unpacked:
            if not self.packed:
                self.packed = self.file.read(ARCHIVE_PIECE)
                if not self.packed and self.frame.eof:
                    return 0
                if not self.packed:
                    raise EOFError("the archive is cut off here")
            if self.frame.eof:
                self.frame = self.unpacker.decompressobj()
            try:
                self.unpacked = memoryview(self.frame.decompress(self.packed))
            except self.error as error:
                raise EOFError(f"the archive is damaged from here on ({error})") from error
            self.packed = self.frame.unused_data if self.frame.eof else b""
        size = min(len(into), len(self.unpacked))
        into[:size] = self.unpacked[:size]
        self.unpacked = self.unpacked[size:]
        return size


def _parsed(content: bytes, part: str, line: int, position: int) -> Document:
    decoded, problem = _decoded(content)
    try:
        value = json.loads(decoded)
    except (ValueError, RecursionError):
        return Document("", part, line, "not JSON", position)
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        return Document("", part, line, 'no string "text"', position)
    meta = value.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    name = _without_surrogates(name)[0] if isinstance(name, str) else part
    text, replaced = _without_surrogates(text)
    return _document(text, problem or replaced, part=name, line=line, position=position)


def _document(text: str, problem: str, *, part: str, line: int, position: int) -> Document:
    return Document(text, part, line, problem if text else "no text in it", position)


def _decoded(content: bytes) -> tuple[str, str]:
    content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode(), ""
    except UnicodeDecodeError:
        return content.decode(errors="replace"), "bad UTF-8 (replaced by U+FFFD)"


def _without_surrogates(text: str) -> tuple[str, str]:
    """JSON can spell half of a pair of surrogates, which is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole, "half a surrogate pair (replaced by U+FFFD)"
    return text, ""

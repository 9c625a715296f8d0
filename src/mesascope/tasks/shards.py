"""Shards: files of tokens, and how they are made from documents, from any place on."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mesascope import store
from mesascope.progress import Amount
from mesascope.tasks.bpe import BPE
from mesascope.tasks.documents import Document, Source, read_documents
from mesascope.untrusted import StoreError, check, open_regular, parse_json

BATCH_CHARACTERS = 2**21
NAMED_PROBLEMS = 100


class Place(NamedTuple):
    """Where a shard ends: so many tokens into the document at this line of this file."""

    file: int = 0
    line: int = 1
    tokens: int = 0


class Problems:
    """How often each problem was met, and where: the first hundred places are named."""

    def __init__(self):
        self.found: dict[str, dict[str, Any]] = {}

    def met(self, problem: str, where: str) -> None:
        """Once more."""
        self.add({problem: {"count": 1, "where": [where]}})

    def add(self, found: dict[str, dict[str, Any]]) -> None:
        """Those of another, which come after these."""
        for problem, more in found.items():
            mine = self.found.setdefault(problem, {"count": 0, "where": []})
            mine["count"] += more["count"]
            mine["where"] = [*mine["where"], *more["where"]][:NAMED_PROBLEMS]


class Shard:
    """Tokens as they are gathered."""

    def __init__(self, size: int, vocabulary: int):
        self.tokens = np.empty(size, np.uint16 if vocabulary <= 2**16 else np.uint32)
        self.filled = 0
        self.starts: list[int] = []
        self.parts: list[str] = []
        self.tokens_of: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()
        self.problems = Problems()
        self.end, self.last = Place(), False

    def begin(self, document: Document) -> None:
        """Its first token comes next."""
        self.starts.append(self.filled)
        self.parts.append(document.part)
        self.bytes_of[document.part] += len(document.text.encode())

    def take(self, tokens: np.ndarray, part: str) -> int:
        """As many as there is room for."""
        taken = min(len(tokens), len(self.tokens) - self.filled)
        self.tokens[self.filled : self.filled + taken] = tokens[:taken]
        self.filled += taken
        self.tokens_of[part] += taken
        return taken

    def ended(self, end: Place, *, last: bool = False) -> "Shard":
        """Where the next one goes on, unless this is the last."""
        self.end, self.last = end, last
        return self

    def written(self, path: Path) -> dict[str, Any]:
        """What `read_record` will find there."""
        names = list(dict.fromkeys(self.parts))
        number = {name: i for i, name in enumerate(names)}
        record = {
            "end": self.end,
            "last": self.last,
            "parts": names,
            "documents": Counter(self.parts),
            "tokens_of": self.tokens_of,
            "bytes_of": self.bytes_of,
            "problems": self.problems.found,
        }
        arrays = {
            "tokens": self.tokens[: self.filled],
            "starts": np.array(self.starts, np.int64),
            "parts": np.array([number[part] for part in self.parts], np.int32),
        }
        store.write_arrays(path, arrays, record=json.dumps(record))
        return record


def make_shards(
    sources: list[Source], tokenizer: BPE, place: Place, size: int, amount: Amount
) -> Iterator[Shard]:
    """The shards from a place on. A problem belongs to the shard that its line ends in."""
    shard, skipped = Shard(size, tokenizer.size), place.tokens
    for file, document, tokens in _tokenized(_from(sources, place, amount), tokenizer):
        done, skipped = skipped, 0
        while done < len(tokens):
            # Full shards wait for one more token, so that the last one is never empty and takes what is left.
            if shard.filled == size:
                yield shard.ended(Place(file, document.line, done))
                shard = Shard(size, tokenizer.size)
            if done == 0:
                shard.begin(document)
            done += shard.take(tokens[done:], document.part)
        if document.problem:
            shard.problems.met(document.problem, f"{sources[file].name}:{document.line}")
    yield shard.ended(Place(len(sources)), last=True)


def _from(sources: list[Source], place: Place, amount: Amount) -> Iterator[tuple[int, Document]]:
    before = sum(size_of(source.path) for source in sources[: place.file])
    for file, source in enumerate(sources[place.file :], start=place.file):
        for document in read_documents(source, place.line if file == place.file else 1):
            amount.reached(before + document.position)
            yield file, document
        before += size_of(source.path)


def _tokenized(
    documents: Iterable[tuple[int, Document]], tokenizer: BPE
) -> Iterator[tuple[int, Document, np.ndarray]]:
    """In batches, each of which is encoded on all cores."""
    waiting: list[tuple[int, Document]] = []
    characters = 0

    def encoded() -> Iterator[tuple[int, Document, np.ndarray]]:
        texts = tokenizer.encode_all([document.text for _, document in waiting])
        for (file, document), tokens in zip(waiting, texts, strict=True):
            # No text, no document.
            yield file, document, np.concatenate([[tokenizer.eos], tokens]) if document.text else tokens

    for file, document in documents:
        waiting.append((file, document))
        characters += len(document.text) + 100
        if characters >= BATCH_CHARACTERS:
            yield from encoded()
            waiting, characters = [], 0
    yield from encoded()


def read_record(path: Path, tokens: int) -> dict[str, Any]:
    """What is in a shard of at most so many tokens and where it ends. StoreError if it is not there or damaged."""
    # Of every token at most: itself, where a document starts with it, and of which part.
    store.check_arrays(path, largest=(4 + 8 + 4) * tokens)
    return _record(store.read_metadata(path), path)


PROBLEMS = {str: {"count": int, "where": [str]}}


def _record(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    counts = {"documents": {str: int}, "tokens_of": {str: int}, "bytes_of": {str: int}}
    form = {"end": [int], "last": bool, "parts": [str], "problems": PROBLEMS} | counts
    record = check(parse_json(metadata.get("record", "null"), path), form, path)
    if len(record["end"]) != 3 or min(record["end"]) < 0:
        raise StoreError(f"{path}: expected a file, a line and a number of tokens where it ends.")
    return record


def map_shard(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and record of a shard, the arrays mapped into memory and not compared with their checksum."""
    arrays, metadata = store.map_arrays(path)
    record = _record(metadata, path)
    kinds = {"tokens": ("uint16", "uint32"), "starts": ("int64",), "parts": ("int32",)}
    if arrays.keys() != kinds.keys() or any(
        array.ndim != 1 or str(array.dtype) not in kinds[name] for name, array in arrays.items()
    ):
        raise StoreError(f"{path}: expected {', '.join(kinds)} as a shard has them.")
    tokens, starts, parts = (arrays[name] for name in kinds)
    ordered = starts.size == 0 or (
        starts[0] >= 0 and starts[-1] < tokens.size and (starts[1:] > starts[:-1]).all()
    )
    known = ((parts >= 0) & (parts < len(record["parts"]))).all()
    if starts.shape != parts.shape or not ordered or not known:
        raise StoreError(f"{path} is damaged: documents begin where there are none.")
    return arrays, record


def size_of(path: Path) -> int:
    """Bytes of a file; none if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sha256_of(path: Path, amount: Amount | None = None) -> str:
    """Of a file's contents. For a file that cannot be read, something that is no checksum."""
    total = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while piece := file.read(2**20):
                total.update(piece)
                if amount is not None:
                    amount.advance(len(piece))
    except (OSError, StoreError) as error:
        return f"cannot be read ({error})"
    return total.hexdigest()

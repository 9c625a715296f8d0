"""Text as token numbers: prepared once, then read in any order.

`prepare` turns files of documents (see `documents`) into a folder named by what went into it:

    corpora/NAME-1f0c9a2b3d/
      encoder.json, vocab.bpe        the tokenizer, in GPT-2's format
      train-00000.safetensors        a shard: `tokens`, and of the documents that begin in it `starts` and `parts`
      validation-00000.safetensors
      index.json                     what it was made from, counts, problems, checksums; written last

Every document begins with the token `eos`, so that there is one between any two, and the first word of a document is
predicted from it. Shards have `shard_tokens` tokens, the last of a split fewer; documents go on from one to the next.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Int
from rich.console import Console

from mesascope import store
from mesascope.progress import Amount
from mesascope.store import StoreError
from mesascope.tasks.bpe import BPE, FILES, check_size, checksums
from mesascope.tasks.documents import Source, find_sources, read_documents
from mesascope.tasks.shards import (
    PROBLEMS,
    Place,
    Problems,
    make_shards,
    map_shard,
    read_record,
    sha256_of,
    size_of,
)
from mesascope.tasks.tokens import Passages
from mesascope.untrusted import LONGEST_INDEX, check, is_plain_name

ALL = slice(None)
FORMAT = 1
# A vocabulary is trained on so much of a corpus: more makes it slower and hardly different.
TRAINING_CHARACTERS = 2**28


@dataclass(frozen=True, kw_only=True)
class Text:
    """Windows of a prepared corpus, as a configuration names them: `Corpus(path).task(length)`.

    Attributes:
        corpus: its digest. Where it lies is no part of a configuration.
        vocabulary: how many tokens there are.
        eos: the one at the beginning of every document.
        length: tokens in a window.
    """

    corpus: str
    vocabulary: int
    eos: int
    length: int

    def __post_init__(self):
        if self.length < 2:
            raise ValueError(f"length: expected at least 2 tokens, got {self.length}.")

    def open(self, data: str | Path | None) -> "Corpus":
        """The corpus in that folder, if it is the one meant."""
        if data is None:
            raise StoreError(
                f"data: this needs the corpus {self.corpus}. Say where it lies (--data DIR); "
                "`mesascope lm prepare` makes one."
            )
        corpus = Corpus(data)
        if corpus.digest != self.corpus:
            raise StoreError(
                f"{data} is another corpus than the one meant ({corpus.digest}, not {self.corpus})."
            )
        return corpus


@final
class Corpus:
    """A prepared corpus.

    Attributes:
        path: of its folder.
    """

    path: Path

    def __init__(self, path: str | Path, *, check: bool = True):
        """Open it.

        Args:
            check: compare shards with their checksums before they are read. Without, their sizes are compared.
        """
        self.path, self._check = Path(path), check

    @cached_property
    def index(self) -> dict[str, Any]:
        """What it was made from and what is in it."""
        if not (self.path / "index.json").exists():
            raise StoreError(
                f"{self.path} is no prepared corpus, or not finished: run `mesascope lm prepare`."
            )
        path = self.path / "index.json"
        index = check(store.read_json(path, LONGEST_INDEX), {"format": int}, path)
        if index["format"] != FORMAT:
            raise StoreError(f"{self.path} is of another version: run `mesascope lm prepare` again.")
        check(index, _INDEX, path)
        # Files of these names are opened, and made anew where they are damaged: no others may be named.
        for split, content in index["splits"].items():
            names = [_shard_name(split, i) for i in range(len(content["shards"]))]
            if (
                not names
                or not is_plain_name(split)
                or names != [shard["file"] for shard in content["shards"]]
            ):
                raise StoreError(f"{path} names files that no corpus has. {_REPAIR}")
        tokenizer = index["tokenizer"]
        if (
            sorted(tokenizer["files"]) != sorted(FILES)
            or not 0 <= tokenizer["eos"] < tokenizer["size"] < 2**31
        ):
            raise StoreError(f"{path} describes no tokenizer. {_REPAIR}")
        return index

    @cached_property
    def tokenizer(self) -> BPE:
        """What its tokens mean."""
        for name, sha256 in self.index["tokenizer"]["files"].items():
            if sha256_of(self.path / name) != sha256:
                raise StoreError(f"{self.path / name} is missing or damaged. {_REPAIR}")
        return BPE(self.path)

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that tell corpora apart by their tokens and what these mean, wherever they lie."""
        shards = {
            split: [s["sha256"] for s in about["shards"]] for split, about in self.index["splits"].items()
        }
        content = {"tokenizer": self.index["tokenizer"], "shards": shards}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]

    def task(self, length: int) -> "Text":
        """Windows of so many tokens of it."""
        tokenizer = self.index["tokenizer"]
        return Text(corpus=self.digest, vocabulary=tokenizer["size"], eos=tokenizer["eos"], length=length)

    @property
    def splits(self) -> tuple[str, ...]:
        """Such as train and validation."""
        return tuple(self.index["splits"])

    def tokens(self, split: str = "train") -> int:
        """How many there are, the `eos` of every document included."""
        return self._split(split)["tokens"]

    def parts(self, split: str = "validation") -> dict[str, int]:
        """Tokens of each part of the corpus."""
        return {name: part["tokens"] for name, part in self._split(split)["parts"].items()}

    def batch(
        self,
        step: int,
        batch_size: int,
        length: int,
        *,
        seed: int,
        split: str = "train",
        rows: slice = ALL,
    ) -> Passages:
        """What to train on in this step, whatever was asked for before.

        The split is cut into windows of `length` tokens; every epoch shows each of them once, in an order of its
        own. Less than a window may be left over at the end. Of the batch, only `rows` are read and returned.
        """
        stream = self._stream(split)
        windows = max(stream.size - 1, 0) // length
        if windows == 0:
            raise ValueError(f"length: {split} has {stream.size} tokens, too few for one window of {length}.")
        sample = step * batch_size + np.arange(batch_size, dtype=np.int64)[rows]
        chosen = np.empty_like(sample)
        for epoch in np.unique(sample // windows):
            here = sample // windows == epoch
            chosen[here] = permuted(sample[here] % windows, windows, seed=(seed, int(epoch)))
        return stream.windows(chosen, length)

    def in_order(
        self,
        batch_size: int,
        length: int,
        *,
        split: str = "validation",
        part: str | None = None,
        rows: slice = ALL,
    ) -> Iterator[Passages]:
        """The whole split, or the documents of one part of it, window after window.

        Every token but the first is a target once. The last windows are filled up with positions that do not count,
        so that all batches have one shape. Of each batch, only `rows` are read and returned.
        """
        stream = self._stream(split)
        if part is not None:
            if part not in self.parts(split):
                raise ValueError(f"part: {split} has {', '.join(self.parts(split))}; got {part!r}.")
            stream = stream.only(part)
        windows = -(-max(stream.size - 1, 0) // length)
        for first in range(0, windows, batch_size):
            yield stream.windows(first + np.arange(batch_size)[rows], length)

    def verify(self, console: Console | None = None) -> None:
        """Compare all files with their checksums.

        Raises:
            StoreError: some differ. The message names them and says what to do.
        """
        if damaged := self._damaged(console):
            raise StoreError(f"{', '.join(map(str, damaged))}: missing or damaged. {_REPAIR}")

    def _damaged(self, console: Console | None) -> list[Path]:
        shards = [shard for split in self.index["splits"].values() for shard in split["shards"]]
        with Amount(console, "checking", sum(shard["bytes"] for shard in shards)) as amount:
            found = []
            for shard in shards:
                if not _is_whole(self.path, shard):
                    found.append(self.path / shard["file"])
                amount.advance(shard["bytes"])
        for name, sha256 in self.index["tokenizer"]["files"].items():
            if sha256_of(self.path / name) != sha256:
                found.append(self.path / name)
        return found

    def _split(self, split: str) -> dict[str, Any]:
        if split not in self.index["splits"]:
            raise ValueError(
                f"{self.path} has no {split!r}, only {', '.join(self.splits)}. Files and folders called "
                "train…, validation… and test… become these when a corpus is prepared."
            )
        return self.index["splits"][split]

    @cached_property
    def _streams(self) -> dict[str, "_Stream"]:
        return {}

    def _stream(self, split: str) -> "_Stream":
        if split not in self._streams:
            content = self._split(split)
            for shard in content["shards"]:
                path = self.path / shard["file"]
                if not (_is_whole(self.path, shard) if self._check else size_of(path) == shard["bytes"]):
                    raise StoreError(f"{path} is missing or damaged. {_REPAIR}")
            self._streams[split] = _Stream.of([self.path / s["file"] for s in content["shards"]], self.index)
        return self._streams[split]


_COUNTS = {"documents": int, "tokens": int, "text_bytes": int}
_SPLIT = _COUNTS | {
    "parts": {str: _COUNTS},
    "problems": PROBLEMS,
    "shards": [{"file": str, "bytes": int, "sha256": str}],
}
_INDEX = {
    "ignored": [str],
    "tokenizer": {"size": int, "eos": int, "files": {str: str}},
    "splits": {str: _SPLIT},
}

_REPAIR = "Run the same `mesascope lm prepare` again: it makes anew what is damaged, and only that."


def permuted(numbers: Int[np.ndarray, " n"], count: int, *, seed: tuple[int, ...]) -> Int[np.ndarray, " n"]:
    r"""Where a random permutation of 0 … `count` - 1 takes these numbers, without writing it down.

    A Feistel network permutes the numbers of 2h bits: $(l, r) \to (r, l \oplus f_i(r))$, eight times. What falls
    beyond `count` goes through it again, which leaves a permutation of the others.
    """
    half = np.uint64(max((count - 1).bit_length() + 1, 2) // 2)
    low = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(seed).generate_state(8, np.uint64)
    out = numbers.astype(np.uint64)
    beyond = np.ones(out.shape, bool)
    while beyond.any():
        left, right = out[beyond] >> half, out[beyond] & low
        for key in keys:
            left, right = right, left ^ (_scrambled(right + key) & low)
        out[beyond] = (left << half) | right
        beyond = out >= count
    return out.astype(np.int64)


def _scrambled(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every bit depends on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class _Stream:
    """Documents one after the other, wherever their tokens lie.

    Attributes:
        shards: mapped, not read.
        offsets: how many tokens come before each shard.
        starts: where each document begins, among the tokens of all shards.
        lengths: of each document.
        parts: which part each document is of.
    """

    shards: tuple[np.ndarray, ...]
    offsets: Int[np.ndarray, " shard"]
    starts: Int[np.ndarray, " document"]
    lengths: Int[np.ndarray, " document"]
    parts: np.ndarray
    eos: int

    @classmethod
    def of(cls, paths: Sequence[Path], index: dict[str, Any]) -> "_Stream":
        shards, starts, parts, offsets, total = [], [], [], [], 0
        for path in paths:
            arrays, record = map_shard(path)
            names = np.array(record["parts"] or [""])
            shards.append(arrays["tokens"])
            starts.append(arrays["starts"] + total)
            parts.append(names[arrays["parts"]])
            offsets.append(total)
            total += arrays["tokens"].size
        begins = np.concatenate(starts)
        lengths = np.diff(begins, append=total)
        eos = index["tokenizer"]["eos"]
        return cls(tuple(shards), np.array(offsets), begins, lengths, np.concatenate(parts), eos)

    def only(self, part: str) -> "_Stream":
        mine = self.parts == part
        return _Stream(
            self.shards, self.offsets, self.starts[mine], self.lengths[mine], self.parts[mine], self.eos
        )

    @cached_property
    def ends(self) -> Int[np.ndarray, " document"]:
        return np.cumsum(self.lengths)

    @cached_property
    def shifts(self) -> Int[np.ndarray, " document"]:
        """From places in this stream to places among all tokens."""
        return self.starts - (self.ends - self.lengths)

    @property
    def size(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def windows(self, numbers: Int[np.ndarray, " batch"], length: int) -> Passages:
        at = numbers[:, None] * length + np.arange(length + 1)
        there = at < self.size
        at = np.minimum(at, self.size - 1)
        # Documents are looked up at both ends of a window and counted in between: that is much faster than at every
        # position.
        first, last = (np.searchsorted(self.ends, at[:, i], side="right") for i in (0, -1))
        segments = np.zeros(at.shape, np.int32)
        begun = last - first
        row = np.repeat(np.arange(len(at)), begun)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(begun) - begun, begun)
        segments[row, self.ends[first[row] + nth] - at[row, 0]] = 1
        segments = np.cumsum(segments, 1, dtype=np.int32)
        where = at + self.shifts[first[:, None] + segments]
        tokens = np.where(there, self._at(where), np.int32(self.eos))
        return Passages(tokens[:, :-1], tokens[:, 1:], there[:, 1:], segments[:, :-1])

    def _at(self, where: Int[np.ndarray, "batch time"]) -> Int[np.ndarray, "batch time"]:
        """Tokens at places that increase along time; most rows lie in one shard."""
        tokens = np.empty(where.shape, np.int32)
        first, last = (np.searchsorted(self.offsets, where[:, i], side="right") - 1 for i in (0, -1))
        for i in np.unique(np.concatenate([first, last])):
            rows = (first == i) & (last == i)
            tokens[rows] = self.shards[i][where[rows] - self.offsets[i]]
        for row in np.flatnonzero(first != last):
            shard = np.searchsorted(self.offsets, where[row], side="right") - 1
            for i in np.unique(shard):
                tokens[row, shard == i] = self.shards[i][where[row, shard == i] - self.offsets[i]]
        return tokens


def prepare(
    data: str | Path | Sequence[str | Path],
    *,
    bpe: int | str | Path = 16384,
    out: str | Path = "corpora",
    shard_tokens: int = 2**24,
    console: Console | None = None,
) -> Corpus:
    """Tokenize a corpus, unless that has been done.

    The same call goes on where an earlier one stopped, for whatever reason, and ends with the same bytes; it also
    makes damaged shards anew.

    Args:
        data: files or folders of documents; see `documents.find_sources`.
        bpe: a folder with `encoder.json` and `vocab.bpe`, such as GPT-2's; or the size of a vocabulary that is trained
            on the training documents (on all, where none are for training).
        shard_tokens: tokens per shard, and how much work a killed process can lose.
    """
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens: expected at least 1, got {shard_tokens}.")
    data = [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]
    sources, ignored = find_sources(data)
    if isinstance(bpe, int):
        check_size(bpe)
    else:
        bpe = Path(bpe)
    with Amount(console, "reading", sum(size_of(source.path) for source in sources)) as amount:
        files = [
            {
                "name": source.name,
                "split": source.split,
                "part": source.part,
                "bytes": size_of(source.path),
                "sha256": sha256_of(source.path, amount),
            }
            for source in sources
        ]
    made_of = {
        "format": FORMAT,
        "files": files,
        "bpe": checksums(bpe) if isinstance(bpe, Path) else bpe,
        "shard_tokens": shard_tokens,
    }
    name = data[0].resolve().name.split(".")[0] or "text"
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:10]
    corpus = Corpus(Path(out) / f"{name}-{digest}")
    with _locked(corpus.path):
        _finish(corpus, sources, made_of | {"ignored": ignored}, bpe, console)
    return Corpus(corpus.path)


def _finish(
    corpus: Corpus, sources: list[Source], made_of: dict[str, Any], bpe: int | Path, console: Console | None
) -> None:
    folder = corpus.path
    for path in folder.glob(".*.tmp"):  # of a process that was killed
        path.unlink()
    if (folder / "index.json").exists():
        try:
            damaged = corpus._damaged(console)
        except StoreError:
            damaged = [folder / "index.json"]
        if not damaged:
            return
        # From here on it is a corpus that is not finished.
        for path in (folder / "index.json", *damaged):
            path.unlink(missing_ok=True)
    tokenizer = _tokenizer(folder, bpe, sources, console)
    splits = {}
    for split in dict.fromkeys(source.split for source in sources):
        mine = [source for source in sources if source.split == split]
        splits[split] = _split_index(folder, split, mine, tokenizer, made_of["shard_tokens"], console)
    about = {"size": tokenizer.size, "eos": tokenizer.eos, "files": checksums(folder)}
    made_with = {name: version(name) for name in ("mesascope", "tokenizers")}
    store.write_json(
        folder / "index.json", made_of | {"made_with": made_with, "tokenizer": about, "splits": splits}
    )


def _tokenizer(folder: Path, bpe: int | Path, sources: list[Source], console: Console | None) -> BPE:
    if isinstance(bpe, Path):
        BPE(bpe)
        for name in FILES:
            store.write(folder / name, (bpe / name).read_bytes())
    elif not all((folder / name).exists() for name in FILES):
        training = [source for source in sources if source.split == "train"] or sources
        total = sum(size_of(source.path) for source in training)
        with Amount(console, f"training a vocabulary of {bpe}", total) as amount:
            return BPE.trained(_training_texts(training, amount), bpe, folder)
    return BPE(folder)


def _training_texts(sources: list[Source], amount: Amount) -> Iterator[str]:
    characters = before = 0
    for source in sources:
        for document in read_documents(source):
            if document.text:
                yield document.text
            characters += len(document.text)
            amount.reached(before + document.position)
            if characters >= TRAINING_CHARACTERS:
                return
        before += size_of(source.path)


def _split_index(
    folder: Path, split: str, sources: list[Source], tokenizer: BPE, size: int, console: Console | None
) -> dict[str, Any]:
    """Every shard that is not there yet, from where the one before it ends."""
    place, making, shards, records = Place(), None, [], []
    with Amount(console, split, sum(size_of(source.path) for source in sources)) as amount:
        while not (records and records[-1]["last"]):
            path = folder / _shard_name(split, len(records))
            try:
                record = read_record(path, size)
                making = None
            except StoreError:
                making = making or make_shards(sources, tokenizer, place, size, amount)
                record = next(making).written(path)
            place = Place(*record["end"])
            records.append(record)
            shards.append({"file": path.name, "bytes": size_of(path), "sha256": sha256_of(path)})
    problems = Problems()
    documents, tokens, text_bytes = Counter[str](), Counter[str](), Counter[str]()
    for record in records:
        problems.add(record["problems"])
        documents.update(record["documents"])
        tokens.update(record["tokens_of"])
        text_bytes.update(record["bytes_of"])
    totals = {"documents": documents, "tokens": tokens, "text_bytes": text_bytes}
    parts = {part: {name: total[part] for name, total in totals.items()} for part in sorted(documents)}
    return {
        **{name: total.total() for name, total in totals.items()},
        "parts": parts,
        "problems": problems.found,
        "shards": shards,
    }


def _shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05}.safetensors"


def _is_whole(folder: Path, shard: dict[str, Any]) -> bool:
    path = folder / shard["file"]
    return size_of(path) == shard["bytes"] and sha256_of(path) == shard["sha256"]


def _locked(folder: Path) -> AbstractContextManager[None]:
    return store.locked(folder, field="out", doing="prepared")

"""Feed every reader files that are damaged or malicious, and hold them to what they promise.

    python scripts/fuzz.py --cases 100000 --record docs/fuzz.md
    python scripts/fuzz.py --cases 100000 --record docs/fuzz.md --atheris    # guided by what the readers execute

A reader must answer with a value or with its own error (`StoreError`, `RunError`): no other exception, no more than
five seconds, no memory beyond what docs/fuzz.md states. A file with a checksum whose bytes were changed blindly must
give the original value or the error; one that was made by somebody who knows the format, or that has no checksum,
some value of the right form.
"""

import argparse
import collections
import contextlib
import datetime
import hashlib
import importlib.util
import io
import json
import math
import platform
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mesascope import provenance, released, runs, store
from mesascope.experiments import results
from mesascope.experiments.reproduce import read_claims
from mesascope.presets import preset
from mesascope.progress import progress_on
from mesascope.runs import Run, RunError
from mesascope.store import StoreError
from mesascope.sweep import read_spec
from mesascope.sweep.pieces import folder_of
from mesascope.tasks.bpe import BPE
from mesascope.tasks.shards import Place, Shard, map_shard, read_record
from mesascope.tasks.text import FORMAT, Corpus, _Stream
from mesascope.training import Config, Trainer, TrainState
from mesascope.untrusted import is_plain_name

SECONDS = 5
SPARE_MEMORY = 2**32
MOST_MEMORY = 2**28
ROOT = Path(__file__).parents[1]
END = "<!-- end -->"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What is fuzzed.

    Attributes:
        make: write good files into a folder.
        file: which of them is changed.
        read: all that is read of it, as something that can be compared.
        checksum: whether its bytes have one.
        share: of all cases.
    """

    name: str
    make: Callable[[Path], None]
    file: str
    read: Callable[[Path], Any]
    checksum: bool = False
    share: float = 1.0


# What is read.


def tiny() -> Config:
    """The smallest model there is."""
    config = preset("linear-1")
    block = replace(config.model.blocks[0], heads=1, key_dim=2)
    sizes = dict(
        batch_size=2, seeds=2, eval_every=5, eval_batches=2, eval_batch_size=4, final_sequences=8, steps=12
    )
    return replace(
        config,
        name="tiny",
        task=replace(config.task, state_dim=2, length=4),
        model=replace(config.model, token_dim=8, output_dim=2, masked=4, blocks=(block,)),
        train=replace(config.train, **sizes),
    )


CONFIG = tiny()


@cache
def shapes() -> TrainState:
    return Trainer(CONFIG).shapes


def state() -> Any:
    """A state of training, of some numbers."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), shapes())


def make_run(folder: Path) -> None:
    path = folder / runs.path_of(CONFIG, folder).name
    now = state()
    store.write_json(path / "config.json", store.to_dict(CONFIG))
    store.write_arrays(path / "checkpoint.safetensors", now, step="5", config=store.digest(CONFIG))
    store.write_arrays(path / "weights.safetensors", now.models, config=store.digest(CONFIG))
    store.write_json(
        path / "provenance.json",
        provenance.of(CONFIG, devices=1) | {"command": ["mesascope", "train"]},
    )
    store.write_json(path / "timing.json", {"seconds": 1.5, "steps_per_second": 8.0, "host_share": 0.1})
    by_position = [[1.0, 0.5, 0.25, 0.125]] * 2
    store.write_json(
        path / "result.json", {"loss": [0.5, 0.25], "loss_by_position": by_position, "sequences": 8}
    )
    lines = [{"step": 0, "eval_loss": [1.0, 0.5], "train_loss": [None, None], "rate": 1e-3}]
    lines += [lines[0] | {"step": i, "train_loss": [2.0, 0.5]} for i in (5, 10, 12)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_unfinished(folder: Path) -> None:
    make_run(folder)
    (folder / RUN / "result.json").unlink()


def of_run(read: Callable[[Run], Any]) -> Callable[[Path], Any]:
    return lambda folder: read(Run(runs.path_of(CONFIG, folder)))


def read_config(run: Run) -> Any:
    config = run.config
    inside = runs.path_of(config, run.path.parent).parent
    assert inside == run.path.parent, "a run would be written outside of its directory"
    return store.to_dict(config)


def make_released(folder: Path) -> None:
    released.write_model(folder / "a.safetensors", state().models, CONFIG, made={"device": "a device"})


def read_released(folder: Path) -> Any:
    models, config = released.read_model(folder / "a.safetensors")
    return models, store.to_dict(config)


def make_figure(folder: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "loss": results.Named.of(rng.normal(size=(2, 3, 4)), "seed", "layer", "time"),
        "steps": results.Named.of(np.arange(5), "step"),
        "which": results.Named.of(np.asfortranarray(rng.normal(size=(3, 2)) > 0), "row", "column"),
        "rate": results.Named.of(np.float32(0.5)),
    }
    about = {
        "arrays": list(arrays),
        "inputs": {"runs/tiny-0123456789": "ab" * 32},
        "seconds": 1.5,
        "made": {"git": "a"},
    }
    results.write(folder / "fig1", arrays, about)


def read_figure(folder: Path) -> Any:
    arrays, about = results.read(folder / "fig1")
    return {name: (array.values, array.axes) for name, array in arrays.items()}, about


def make_corpus(folder: Path) -> None:
    shard = Shard(64, 300)
    document = collections.namedtuple("Document", "part text")
    for i in range(6):
        shard.begin(document(["web", "code"][i % 2], "some text"))  # pyright: ignore[reportArgumentType]
        shard.take(np.arange(i, i + 10), ["web", "code"][i % 2])
    shard.problems.met("not JSON", "a.jsonl:3")
    path = folder / "train-00000.safetensors"
    record = shard.ended(Place(1), last=True).written(path)
    counts = {"documents": 3, "tokens": 30, "text_bytes": 27}
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    split = {name: 2 * count for name, count in counts.items()} | {
        "parts": {"code": counts, "web": counts},
        "problems": record["problems"],
        "shards": [{"file": path.name, "bytes": path.stat().st_size, "sha256": sha256}],
    }
    tokenizer = {"size": 300, "eos": 0, "files": {"encoder.json": "ab" * 32, "vocab.bpe": "cd" * 32}}
    index = {"format": FORMAT, "files": [], "bpe": 300, "shard_tokens": 64, "ignored": []}
    store.write_json(folder / "index.json", index | {"tokenizer": tokenizer, "splits": {"train": split}})


def read_corpus(folder: Path) -> Any:
    corpus = Corpus(folder, check=False)
    for split in corpus.index["splits"].values():
        assert all(is_plain_name(shard["file"]) for shard in split["shards"]), "a file outside of the corpus"
    if "train" not in corpus.splits:
        return None
    return corpus.index, read_record(folder / "train-00000.safetensors", 64), corpus.batch(0, 2, 8, seed=0)


def read_shard(folder: Path) -> Any:
    path = folder / "train-00000.safetensors"
    record, (arrays, again) = read_record(path, 64), map_shard(path)
    assert record == again
    return record, arrays, _Stream.of([path], {"tokenizer": {"eos": 0}}).windows(np.arange(2), 8)


def read_damaged(folder: Path) -> Any:
    return [path.name for path in Corpus(folder)._damaged(None)]


def make_claims(folder: Path) -> None:
    check = {"what": "loss", "ours": 0.5, "interval": [0.25, 0.75], "at_most": 1.0, "at_least": None}
    check["by_seed"] = [0.25, 0.75]
    claim = {"id": "1a", "figure": "fig1", "verdict": "holds", "ours": None, "checks": [check]}
    store.write_json(folder / "claims.json", [claim])


def make_spec(folder: Path) -> None:
    spec = {"presets": ["linear-1", "mesa-1"], "variants": ["as_run"], "seeds": 5, "at_once": 2}
    spec |= {
        "set": {"train.steps": 20, "model.clip": 0.5},
        "over": {"train.optimizer.rate.peak": [0.5, 0.25]},
    }
    store.write_json(folder / "spec.json", spec)
    (folder / "spec.toml").write_text(
        'presets = ["linear-1", "mesa-1"]\nvariants = ["as_run"]\nseeds = 5\nat_once = 2\n[set]\n"train.steps" = 20\n'
        '"model.clip" = 0.5\n[over]\n"train.optimizer.rate.peak" = [0.5, 0.25]\n'
    )


def of_spec(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        pieces = read_spec(folder / name, runs=folder)
        assert all(folder_of(piece).path.parent == folder / ".sweeps" for piece in pieces), (
            "a piece outside of its folder"
        )
        return [piece.name for piece in pieces]

    return read


def make_tokenizer(folder: Path) -> None:
    BPE.trained(["some text, and some more text"] * 3, 270, folder)


def read_tokenizer(folder: Path) -> Any:
    tokenizer = BPE(folder)
    return tokenizer.size, tokenizer.eos, tokenizer.decode(tokenizer.encode("some text"))


RUN = runs.path_of(CONFIG, Path()).name
READERS = {
    reader.name: reader
    for reader in (
        Reader(name="weights", make=make_run, file=f"{RUN}/weights.safetensors", checksum=True, share=3,
               read=lambda folder: store.read_arrays(folder / RUN / "weights.safetensors", shapes().models)),
        Reader(name="checkpoint", make=make_unfinished, file=f"{RUN}/checkpoint.safetensors", checksum=True, share=3,
               read=of_run(lambda run: (run._restore(shapes(), progress_on(None)), run.step))),
        Reader(name="released model", make=make_released, file="a.safetensors", checksum=True, read=read_released,
               share=0.3),
        Reader(name="config.json", make=make_run, file=f"{RUN}/config.json", read=of_run(read_config), share=2),
        Reader(name="metrics.jsonl", make=make_run, file=f"{RUN}/metrics.jsonl",
               read=of_run(lambda run: run.metrics())),
        Reader(name="result.json", make=make_run, file=f"{RUN}/result.json", read=of_run(lambda run: run.result)),
        Reader(name="timing.json", make=make_run, file=f"{RUN}/timing.json", read=of_run(lambda run: run.timing),
               share=0.5),
        Reader(name="provenance.json", make=make_run, file=f"{RUN}/provenance.json",
               read=of_run(lambda run: run.provenance), share=0.5),
        Reader(name="figure.npz", make=make_figure, file="fig1.npz", checksum=True, read=read_figure, share=3),
        Reader(name="figure.json", make=make_figure, file="fig1.json", read=read_figure),
        Reader(name="token shard", make=make_corpus, file="train-00000.safetensors", checksum=True, read=read_shard,
               share=3),
        Reader(name="corpus index", make=make_corpus, file="index.json", read=read_corpus),
        Reader(name="corpus check", make=make_corpus, file="index.json", read=read_damaged, share=0.5),
        Reader(name="vocabulary", make=make_tokenizer, file="encoder.json", read=read_tokenizer, share=0.5),
        Reader(name="merges", make=make_tokenizer, file="vocab.bpe", read=read_tokenizer, share=0.5),
        Reader(name="sweep.json", make=make_spec, file="spec.json", read=of_spec("spec.json"), share=0.5),
        Reader(name="sweep.toml", make=make_spec, file="spec.toml", read=of_spec("spec.toml"), share=0.5),
        Reader(name="claims.json", make=make_claims, file="claims.json", share=0.5,
               read=lambda folder: read_claims(folder / "claims.json")),
    )
}  # fmt: skip


# How files are changed: blindly, or by somebody who knows the format.

NUMBERS = (0, 1, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def blind(content: bytes, rng: np.random.Generator) -> bytes:
    """Bits, bytes and stretches of a file changed."""
    data = bytearray(content)

    def stretch(longest: int = 64) -> tuple[int, int]:
        start = int(rng.integers(0, max(len(data), 1)))
        return start, start + int(rng.integers(1, longest + 1))

    for _ in range(int(rng.integers(1, 4))):
        (start, end), how = stretch(), rng.integers(0, 10)
        if how <= 1 and data:
            data[start] ^= 1 << int(rng.integers(0, 8))
        elif how == 2:
            data[start:end] = rng.bytes(end - start)
        elif how == 3:
            data[start:end] = bytes([int(rng.choice([0, 255, 48, 57]))]) * (end - start)
        elif how == 4:
            del data[start:]
        elif how == 5:
            del data[start:end]
        elif how == 6:
            data[start:start] = data[slice(*stretch())]
        elif how == 7:
            size = int(rng.choice([1, 2, 4, 8]))
            number = int(rng.choice(len(NUMBERS)))
            data[start : start + size] = (NUMBERS[number] % 256**size).to_bytes(
                size, rng.choice(["little", "big"])
            )
        elif how == 8:
            data.extend(rng.bytes(end - start))
        else:  # the fields that say how much there is are at both ends
            at = int(rng.choice([0, max(len(data) - 22, 0), max(len(data) - 12, 0)]))
            number = NUMBERS[int(rng.choice(len(NUMBERS)))]
            data[at : at + 8] = (number % 2**64).to_bytes(8, "little")
    return bytes(data)


STRINGS = (
    "", ".", "..", "../../../../etc/passwd", "/etc/passwd", "a/b", "a\\b", "\0", "a\nb", "\ud800", "𝕏" * 50,
    "x" * 100_000, "NaN", "__class__", "{0.__class__}", "kind", "Config", "Mesa", "%s%n", "[bold]", "1" * 30,
)  # fmt: skip
ODD = (
    None, True, False, 0, -1, 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 10**400, 0.5, -0.0, 1e308, -1e308, [], {},
    [[]], [None] * 1000, {"kind": "Config"}, {"kind": []}, {"kind": "Block"},
    float("nan"), float("inf"), float("-inf"), *STRINGS,
)  # fmt: skip


def odd(rng: np.random.Generator) -> Any:
    value = ODD[int(rng.integers(0, len(ODD)))]
    if rng.random() < 0.05:
        for _ in range(int(rng.choice([10, 70, 500]))):
            value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def changed(value: Any, rng: np.random.Generator) -> Any:
    """JSON data with one part of it replaced, removed, repeated or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = list(value)[int(rng.integers(0, len(value)))]
        how = rng.integers(0, 10)
        if how == 0:
            return {n: v for n, v in value.items() if n != name}
        if how == 1:
            new = STRINGS[int(rng.integers(0, len(STRINGS)))]
            return {new if n == name else n: v for n, v in value.items()}
        if how == 2:
            return value | {STRINGS[int(rng.integers(0, len(STRINGS)))]: odd(rng)}
        return value | {name: changed(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        i, how = int(rng.integers(0, len(value))), rng.integers(0, 8)
        if how == 0:
            return value[:i] + value[i + 1 :]
        if how == 1:
            return [*value[:i], *[value[i]] * int(rng.choice([2, 100, 2000])), *value[i:]]
        return [*value[:i], changed(value[i], rng), *value[i + 1 :]]
    if isinstance(value, str) and value[:1] in ("{", "[") and rng.random() < 0.9:  # JSON in JSON
        with contextlib.suppress(ValueError):
            return dumped(changed(json.loads(value), rng))
    if isinstance(value, int) and rng.random() < 0.4:
        return value + int(rng.choice([-1, 1, 1000, -value, 2**33]))
    return odd(rng)


def dumped(value: Any) -> str:
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(10_000)
        return json.dumps(value)
    finally:
        sys.setrecursionlimit(limit)


def knowing_json(content: bytes, rng: np.random.Generator) -> bytes:
    """Other values in the same form; or what JSON allows and nobody expects."""
    how = rng.integers(0, 20)
    if how == 0:
        depth = int(rng.choice([65, 1000, 100_000]))
        return b"[" * depth + b"]" * depth
    if how == 1:
        return content.replace(
            b"0.5", rng.choice([b"NaN", b"Infinity", b"1e999", b"-1e999", b"1" * 5000, b"0x5"]), 1
        )
    if how == 2:
        return (
            rng.choice([b"", b"null", b"3", b"\xef\xbb\xbf", b"\xff\xfe", b'"', b"{}", b"[]"])
            + content[: rng.integers(2) * 999]
        )
    if how == 3:
        return content.decode().encode(rng.choice(["utf-16", "utf-32"]))
    lines = content.splitlines(keepends=True)
    if len(lines) > 1 and lines[0].startswith(b'{"step"'):  # one document per line
        i = int(rng.integers(0, len(lines)))
        lines[i] = dumped(changed(json.loads(lines[i]), rng)).encode() + b"\n"
        return b"".join(lines)
    value = json.loads(content)
    for _ in range(int(rng.integers(1, 3))):
        value = changed(value, rng)
    return dumped(value).encode()


def knowing_safetensors(content: bytes, rng: np.random.Generator) -> bytes:
    """Another header of the right length, often with checksums that fit."""
    length = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + length]), content[8 + length :]
    for _ in range(int(rng.integers(1, 3))):
        try:
            about = json.loads(header["__metadata__"]["mesascope"])
        except (KeyError, TypeError, ValueError):
            about = None
        if about is None or rng.random() < 0.5:
            header = changed(header, rng)
        else:
            header["__metadata__"] = {"mesascope": dumped(changed(about, rng))}
    if rng.random() < 0.2:
        rest = rest[: rng.integers(0, len(rest) + 1)] if rng.random() < 0.5 else blind(rest, rng)
    if rng.random() < 0.7:
        header = resealed(header, rest)
    written = dumped(header).encode()
    length = len(written) if rng.random() < 0.9 else NUMBERS[int(rng.integers(0, len(NUMBERS)))]
    return (length % 2**64).to_bytes(8, "little") + written + rest


def resealed(header: Any, rest: bytes) -> Any:
    """With the checksums that belong to it, if there can be any."""
    try:
        about = json.loads(header["__metadata__"]["mesascope"])
        arrays = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                dtype = {"F32": "f4", "I32": "i4", "U16": "u2", "I64": "i8"}[entry["dtype"]]
                arrays[name] = np.frombuffer(rest[start:end], dtype).reshape(entry["shape"])
        about |= {"sha256": store._checksum(arrays)}
        about.pop("sha256_of_metadata", None)
        about["sha256_of_metadata"] = store._metadata_checksum(about)
        return header | {"__metadata__": {"mesascope": dumped(about)}}
    except Exception:
        return header


def bomb(mebibytes: int) -> bytes:
    """Zeros, packed a thousand times smaller."""
    shape = f"({mebibytes * 2**17},)"
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("loss.npy", "w") as file:
        file.write(b"\x93NUMPY\x01\x00v\x00" + header.encode())
        for _ in range(mebibytes):
            file.write(bytes(2**20))
    return packed.getvalue()


_BOMB: list[bytes] = []
DESCRIPTIONS = [
    "'<f8'", "'|O'", "'<i8'", "'|V8'", "'>f8'", "'<U9999999'", "[('a', '<f8')]", "'<f99'", "'|b1'", "'<M8[s]'",
    "('<f8', (2,))",
]  # fmt: skip
SHAPES = [
    "(2, 3, 4)", "(24,)", "()", "(-1,)", "(99999999999, 9999999999)", "(0, 99999999999999)", "(2**40,)",
    "(" + "1, " * 40 + ")", "(1" + "0" * 400 + ",)",
]  # fmt: skip


def knowing_npz(content: bytes, rng: np.random.Generator) -> bytes:
    """An archive with members that lie about themselves."""
    if rng.random() < 0.002:
        if not _BOMB:
            _BOMB.append(bomb(384))
        return _BOMB[0]
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = list(members)[int(rng.integers(0, len(members)))]
    body = members[name][members[name].index(b"\n") + 1 :]
    descr, shape = rng.choice(DESCRIPTIONS), rng.choice(SHAPES)
    header = (
        f"{{'descr': {descr}, 'fortran_order': {rng.choice(['True', 'False', '[]'])}, 'shape': {shape}, }}\n"
    )
    length = len(header) if rng.random() < 0.9 else int(rng.integers(0, 2**16))
    version = rng.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
    members[name] = b"\x93NUMPY" + version + length.to_bytes(2, "little") + header.encode() + body
    if rng.random() < 0.2:
        members[name] = b"\x80\x04cposix\nsystem\n(S'true'\ntR."
    packed = io.BytesIO()
    with zipfile.ZipFile(
        packed, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.7 else zipfile.ZIP_STORED
    ) as archive:
        for member, written in members.items():
            odd_name = member == name and rng.random() < 0.1
            archive.writestr(
                rng.choice(["../x.npy", "/x.npy", "x" * 60000, "loss"]) if odd_name else member, written
            )
    made = bytearray(packed.getvalue())
    if rng.random() < 0.5:  # what the archive's index says of a member: flags, method, sizes, where it is
        at = made.index(b"PK\x01\x02") + int(rng.choice([8, 10, 16, 20, 24, 28, 42]))
        made[at : at + 4] = (NUMBERS[int(rng.integers(0, len(NUMBERS)))] % 2**32).to_bytes(4, "little")
    return bytes(made)


KNOWING = {
    ".toml": blind,
    ".bpe": blind,
    ".json": knowing_json,
    ".jsonl": knowing_json,
    ".safetensors": knowing_safetensors,
    ".npz": knowing_npz,
}


# One case, and many.


class HangError(BaseException):
    """A case took too long. (No `Exception`, which a reader might catch.)"""


def canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: canonical(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in value]
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value)
        return (str(value.dtype), value.shape, value.tobytes())
    return canonical(jax.tree.leaves(value))


class Case:
    """A reader with its good files in a folder, to be changed again and again."""

    def __init__(self, reader: Reader, folder: Path):
        self.reader, self.folder = reader, folder
        reader.make(folder)
        self.path = folder / reader.file
        self.original = self.path.read_bytes()
        self.value = canonical(reader.read(folder))

    def run(self, seed: int) -> tuple[str, str]:
        """The outcome, and of a failure what happened."""
        rng = np.random.default_rng([seed, *self.reader.name.encode()])
        blindly = rng.random() < 0.5
        content = (blind if blindly else KNOWING[self.path.suffix])(self.original, rng)
        if rng.random() < 0.1:
            blindly, content = False, blind(content, rng)
        return self.outcome(content, blindly=blindly)

    def outcome(self, content: bytes, *, blindly: bool = False) -> tuple[str, str]:
        """The same of a file with this content, which was changed without care for checksums, or perhaps with."""
        self.path.unlink(missing_ok=True)  # a mapping of the one before stays as it was
        self.path.write_bytes(content)
        previous = signal.signal(signal.SIGVTALRM, _hang)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            value = canonical(self.reader.read(self.folder))
        except (StoreError, RunError) as error:
            return (
                ("refused", "")
                if 0 < len(str(error)) < 2000
                else ("failed", f"a message of {len(str(error))}")
            )
        except BaseException:
            return "failed", traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, previous)
        if value == self.value:
            return "read as it was", ""
        if self.reader.checksum and blindly:
            return "failed", "other values than were written, and no error"
        return "read as another of its kind", ""


def _hang(number: int, frame: Any) -> None:
    raise HangError(f"more than {SECONDS} seconds")


OUTCOMES = ("refused", "read as it was", "read as another of its kind", "failed")


Found = dict[str, collections.Counter[str]]


def counts(cases: int) -> dict[str, int]:
    """How many of the cases each reader gets."""
    shares = sum(reader.share for reader in READERS.values())
    return {name: math.ceil(cases * reader.share / shares) for name, reader in READERS.items()}


def tell_failure(name: str, told: str, content: bytes, failures: Path | None) -> None:
    print(f"{name}:\n{told}", file=sys.stderr)
    if failures is not None:
        failures.mkdir(parents=True, exist_ok=True)
        (failures / name).write_bytes(content)


def limit_memory() -> None:
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + SPARE_MEMORY, resource.RLIM_INFINITY))


def fuzz(cases: int, *, first: int = 0, failures: Path | None = None) -> tuple[Found, int]:
    """Outcomes by reader, and by how many bytes the process grew. Files that a reader failed on are kept where
    `failures` says."""
    before, found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, {}
    limit_memory()
    for reader in READERS.values():
        with tempfile.TemporaryDirectory() as folder:
            case = Case(reader, Path(folder))
            found[reader.name] = collections.Counter()
            for seed in range(first, first + counts(cases)[reader.name]):
                outcome, told = case.run(seed)
                found[reader.name][outcome] += 1
                if outcome == "failed":
                    tell_failure(f"{reader.name}-{seed}", told, case.path.read_bytes(), failures)
    return found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def fuzz_guided(cases: int, *, first: int = 0, failures: Path | None = None) -> tuple[Found, int]:
    """The same by atheris, and of the process that grew most (`fuzz_guided.py`)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "scripts.fuzz_guided", "--cases", str(cases), "--first", str(first)]
        command += [
            "--out",
            str(out),
            *([] if failures is None else ["--failures", str(failures.absolute())]),
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        told = json.loads(out.read_text())
    found = {name: collections.Counter(outcomes) for name, (outcomes, _) in told.items()}
    return found, max(grown for _, grown in told.values())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--failures", type=Path, help="keep here the files that a reader failed on")
    parser.add_argument("--record", type=Path, help="write the outcome to its place in this file")
    parser.add_argument("--atheris", action="store_true", help="let atheris change files, guided by coverage")
    given = parser.parse_args()
    if given.atheris and importlib.util.find_spec("atheris") is None:
        parser.error("--atheris: needs `pip install atheris` (Linux, CPython 3.11 to 3.13).")
    began, commit = time.monotonic(), provenance.git_commit()
    found, grown = (fuzz_guided if given.atheris else fuzz)(
        given.cases, first=given.first, failures=given.failures
    )
    table = ["| reader | cases | " + " | ".join(OUTCOMES) + " |", "|---|" + "--:|" * (1 + len(OUTCOMES))]
    for name, outcomes in found.items():
        counts = " | ".join(f"{outcomes[outcome]:,}" for outcome in OUTCOMES)
        table.append(f"| {name} | {outcomes.total():,} | {counts} |")
    all_outcomes = sum(found.values(), collections.Counter())
    counts = " | ".join(f"{all_outcomes[outcome]:,}" for outcome in OUTCOMES)
    table.append(f"| all | {all_outcomes.total():,} | {counts} |")
    minutes = (time.monotonic() - began) / 60
    memory = f"{minutes:.0f} minutes; the process grew by {grown >> 20} MiB of {MOST_MEMORY >> 20} allowed."
    print("\n".join([*table, "", memory]))
    failed = all_outcomes["failed"] or grown > MOST_MEMORY
    if given.record is not None:
        used = ("jax", "numpy", "safetensors", *(("atheris",) if given.atheris else ()))
        libraries = ", ".join(f"{name} {version(name)}" for name in used)
        command = shlex.join(["python", "scripts/fuzz.py", *sys.argv[1:]])
        machine = f"Python {platform.python_version()}, {libraries}, {platform.system()}"
        made = f"{datetime.date.today()}, commit {str(commit)[:10]}, {machine}: `{command}`"
        text, start = given.record.read_text(), f"<!-- recorded{' with atheris' if given.atheris else ''} -->"
        before, _, after = text.partition(start)
        after = after[after.index(END) :]
        given.record.write_text(before + "\n".join([start, "", made, "", *table, "", memory, ""]) + after)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

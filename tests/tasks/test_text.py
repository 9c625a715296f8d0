"""Text to shards and back, through what happens on the way: killed, damaged, asked for twice."""

import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from mesascope import store
from mesascope.cli import main
from mesascope.store import StoreError
from mesascope.tasks import text
from mesascope.tasks.bpe import BPE, EOS
from mesascope.tasks.text import Corpus, permuted, prepare
from tests.tasks.test_documents import lines, packed

SIZE, SHARD = 400, 200


def sentences(count, seed):
    """Little stories: enough structure for a vocabulary to find words."""
    rng = random.Random(seed)
    who = ["The heron", "A wren", "An owl", "The old crow", "No gull", "Every swift"]
    does = ["watches", "follows", "doesn't mind", "has counted", "forgets", "remembers"]
    what = ["the 12 boats", "a rising tide", "its own shadow", "the keeper's lamp", "rain, and more rain"]
    return [f"{rng.choice(who)} {rng.choice(does)} {rng.choice(what)}." for _ in range(count)]


def story(seed):
    return " ".join(sentences(3 + seed % 7, seed)) + ("\n\n  The end.\n" if seed % 3 else "")


STORIES = [story(i) for i in range(60)]
CODE = [f"def f{i}(x):\n    return {i} * x  # <|endoftext|> is text here\n" for i in range(30)]
HELD_OUT = [story(i) for i in range(100, 112)] + ["naïve 😀 café"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "shore"
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "a.jsonl.zst").write_bytes(
        packed(lines(*STORIES) + b"broken\n") + packed(lines("Cut"))[:-4]
    )
    (folder / "train" / "b.jsonl").write_bytes(
        b'{"text": ""}\n' + lines(*CODE[:20], part="code") + b"{}\nx\n"
    )
    (folder / "train" / "c.txt").write_text(CODE[20])
    held_out = b"".join(lines(t, part="birds" if i % 3 else "code") for i, t in enumerate(HELD_OUT))
    (folder / "validation.jsonl").write_bytes(held_out)
    (folder / "README.md").write_text("not text")
    return folder


@pytest.fixture(scope="module")
def corpus(data, tmp_path_factory):
    return prepare([data], bpe=SIZE, out=tmp_path_factory.mktemp("corpora"), shard_tokens=SHARD)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def flat(corpus, split):
    """All tokens and the beginnings of documents, read with another library's reader."""
    from safetensors.numpy import load_file

    tokens, starts = [], []
    for shard in corpus.index["splits"][split]["shards"]:
        arrays = load_file(corpus.path / shard["file"])
        starts.extend((arrays["starts"] + sum(map(len, tokens))).tolist())
        tokens.append(arrays["tokens"])
    assert all(len(t) == SHARD for t in tokens[:-1])
    assert 0 < len(tokens[-1]) <= SHARD
    return np.concatenate(tokens), starts


@pytest.mark.parametrize(("split", "expected"), [("train", STORIES + CODE[:21]), ("validation", HELD_OUT)])
def test_documents_come_back(corpus, split, expected):
    tokens, starts = flat(corpus, split)
    assert tokens.dtype == np.uint16
    eos = corpus.tokenizer.eos
    assert starts == np.flatnonzero(tokens == eos).tolist()
    pieces = np.split(tokens, starts[1:])
    assert [corpus.tokenizer.decode(piece[1:]) for piece in pieces] == expected
    about = corpus.index["splits"][split]
    assert about["documents"] == len(expected)
    assert about["tokens"] == len(tokens) == corpus.tokens(split)
    assert about["text_bytes"] == sum(len(t.encode()) for t in expected)
    assert sum(corpus.parts(split).values()) == len(tokens)


def test_what_was_not_read_is_named(corpus):
    assert corpus.index["ignored"] == ["README.md"]
    problems = corpus.index["splits"]["train"]["problems"]
    assert problems == {
        "not JSON": {"count": 2, "where": ["train/a.jsonl.zst:61", "train/b.jsonl:23"]},
        "the archive is cut off here": {"count": 1, "where": ["train/a.jsonl.zst:62"]},
        "no text in it": {"count": 1, "where": ["train/b.jsonl:1"]},
        'no string "text"': {"count": 1, "where": ["train/b.jsonl:22"]},
    }
    assert corpus.index["splits"]["validation"]["problems"] == {}


def by_hand(folder, content):
    """GPT-2's encoding for ASCII, from its description: words, then the earliest merge first."""
    numbers = json.loads((folder / "encoder.json").read_text())
    merges = (folder / "vocab.bpe").read_text().split("\n")[1:-1]
    rank = {tuple(merge.split()): i for i, merge in enumerate(merges)}
    words = re.findall(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", content)
    found = []
    for word in words:
        pieces = [chr(256 + ord(c)) if c in "\n\t " else c for c in word]
        while len(pieces) > 1:
            best = min(pairwise(pieces), key=lambda pair: rank.get(pair, 10**9))
            if best not in rank:
                break
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == best:
                    pieces[i : i + 2] = ["".join(best)]
                i += 1
        found += [numbers[piece] for piece in pieces]
    return found


def test_encoding_against_one_written_by_hand(corpus):
    assert corpus.tokenizer.size == SIZE
    for content in STORIES[:20] + CODE[:5]:
        encoded = corpus.tokenizer.encode(content)
        assert encoded.tolist() == by_hand(corpus.path, content)
        assert corpus.tokenizer.eos not in encoded
        assert len(encoded) < 0.6 * len(content)


def test_asked_for_twice(corpus, data):
    before = {path: path.stat().st_mtime_ns for path in corpus.path.iterdir()}
    console = Console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    again = prepare([data], bpe=SIZE, out=corpus.path.parent, shard_tokens=SHARD, console=console)
    assert again.path == corpus.path
    assert {path: path.stat().st_mtime_ns for path in corpus.path.iterdir()} == before
    other = prepare([data / "train" / "c.txt"], bpe=SIZE, out=corpus.path.parent, shard_tokens=SHARD)
    assert other.path != corpus.path


def test_going_on_from_any_shard(corpus, data, tmp_path):
    """Documents lie across the ends of most shards."""
    whole, names = contents(corpus.path), sorted(p.name for p in corpus.path.glob("*.safetensors"))
    folder = tmp_path / corpus.path.name
    for there in range(0, len(names), 3):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(corpus.path, folder)
        for name in ["index.json", *names[there:]]:
            (folder / name).unlink()
        prepare([data], bpe=SIZE, out=tmp_path, shard_tokens=SHARD)
        assert contents(folder) == whole


@pytest.mark.faults
def test_killed(corpus, data, tmp_path):
    """SIGKILL to a real process while it writes a shard; the next one ends with the bytes of an undisturbed one.

    The vocabulary is trained in two processes, so it is the same in all.
    """
    code = (
        "import os, sys, time, pathlib\n"
        "from mesascope.tasks.text import prepare\n"
        "replace = os.replace\n"
        "def pause(old, new):\n"
        "    if 'train-00003' in str(new): print('now', flush=True); time.sleep(300)\n"
        "    replace(old, new)\n"
        "os.replace = pause\n"
        f"prepare([sys.argv[1]], bpe={SIZE}, out=pathlib.Path(sys.argv[2]), shard_tokens={SHARD})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(data), str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    folder = tmp_path / corpus.path.name
    left = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert sorted(left) == [f"train-{i:05}.safetensors" for i in range(3)]
    prepare([data], bpe=SIZE, out=tmp_path, shard_tokens=SHARD)
    assert {name: (folder / name).stat().st_mtime_ns for name in left} == left
    assert contents(folder) == contents(corpus.path)


@pytest.mark.faults
def test_damage_is_found_named_and_repaired(corpus, data, tmp_path):
    folder = tmp_path / corpus.path.name
    shutil.copytree(corpus.path, folder)
    whole = contents(folder)
    victim = folder / "train-00001.safetensors"
    damaged = bytearray(victim.read_bytes())
    damaged[-5] ^= 1
    victim.write_bytes(damaged)
    message = r"train-00001.safetensors is missing or damaged. Run the same `mesascope lm prepare` again"
    with pytest.raises(StoreError, match=message):
        Corpus(folder).batch(0, 2, 16, seed=0)
    with pytest.raises(StoreError, match=r"train-00001.safetensors: missing or damaged"):
        Corpus(folder).verify()
    Corpus(folder, check=False).batch(0, 2, 16, seed=0)
    victim.write_bytes(damaged[:-1])
    with pytest.raises(StoreError, match=message):
        Corpus(folder, check=False).batch(0, 2, 16, seed=0)
    (folder / "vocab.bpe").write_text("")
    with pytest.raises(StoreError, match=r"vocab.bpe is missing or damaged"):
        _ = Corpus(folder).tokenizer
    others = {p: p.stat().st_mtime_ns for p in folder.glob("*.safetensors") if p != victim}
    prepare([data], bpe=SIZE, out=tmp_path, shard_tokens=SHARD)
    assert contents(folder) == whole
    assert {p: p.stat().st_mtime_ns for p in others} == others
    (folder / "index.json").write_text("{")
    prepare(str(data), bpe=SIZE, out=str(tmp_path), shard_tokens=SHARD)
    assert contents(folder) == whole
    (folder / "index.json").unlink()
    with pytest.raises(StoreError, match="is no prepared corpus, or not finished"):
        Corpus(folder).batch(0, 2, 16, seed=0)
    with text._locked(folder), pytest.raises(StoreError, match="is being prepared by another process"):
        prepare([data], bpe=SIZE, out=tmp_path, shard_tokens=SHARD)


def test_batches_by_step(corpus):
    """Against slices of the whole; every epoch shows every window once, in an order of its own."""
    length, size = 32, 5
    tokens, starts = flat(corpus, "train")
    windows = (len(tokens) - 1) // length
    where = {tuple(tokens[i * length : (i + 1) * length].tolist()): i for i in range(windows)}
    assert len(where) == windows
    seen = []
    for step in range(2 * windows // size + 1):
        batch = corpus.batch(step, size, length, seed=3)
        assert batch.predicts.all()
        assert {a.dtype for a in (batch.tokens, batch.targets, batch.segments)} == {np.dtype("int32")}
        for row in range(size):
            window = where[tuple(batch.tokens[row].tolist())]
            first = window * length
            assert np.array_equal(batch.targets[row], tokens[first + 1 : first + 1 + length])
            document = np.searchsorted(starts, first + np.arange(length), side="right")
            assert np.array_equal(batch.segments[row], document - document[0])
            seen.append(window)
    epochs = [seen[:windows], seen[windows : 2 * windows]]
    assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    again = Corpus(corpus.path).batch(7, size, length, seed=3)
    assert all(
        np.array_equal(a, b) for a, b in zip(again, corpus.batch(7, size, length, seed=3), strict=True)
    )
    assert not np.array_equal(again.tokens, corpus.batch(7, size, length, seed=4).tokens)


@pytest.mark.parametrize(("part", "length"), [(None, 50), ("birds", 50), ("code", 50), (None, 500)])
def test_in_order(corpus, part, length):
    """Every token but the first is predicted once, from those before it. (500 is more than two shards.)"""
    tokens, starts = flat(corpus, "validation")
    documents = np.split(tokens, starts[1:])
    if part is not None:
        documents = [d for i, d in enumerate(documents) if ("birds" if i % 3 else "code") == part]
        assert corpus.parts()[part] == sum(map(len, documents))
    expected = np.concatenate(documents)
    number = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    batches = list(corpus.in_order(3, length, part=part))
    assert {batch.tokens.shape for batch in batches} == {(3, length)}
    read, wanted, counts, segments = (np.concatenate([b[i].reshape(-1) for b in batches]) for i in range(4))
    assert counts.sum() == len(expected) - 1
    assert np.array_equal(wanted[counts], expected[1:])
    assert np.array_equal(read[: len(expected)], expected)
    # Where documents change within a window, and only there.
    change = np.diff(segments[: len(expected)]) != 0
    inside = np.arange(1, len(expected)) % length != 0
    assert np.array_equal(change[inside], np.diff(number)[inside] != 0)
    assert not segments[::length].any()


def test_permutations():
    orders = {}
    for count in [*range(1, 40), 64, 65, 1000]:
        orders[count] = permuted(np.arange(count), count, seed=(0, 0))
        assert sorted(orders[count]) == list(range(count))
    assert not np.array_equal(orders[1000], permuted(np.arange(1000), 1000, seed=(0, 1)))
    # All places alike: over seeds, where number 3 of 10 goes, and which number follows it.
    goes = np.array([permuted(np.array([3, 4]), 10, seed=(seed, 0)) for seed in range(1000)])
    for counts, expected in [
        (np.bincount(goes[:, 0], minlength=10), 100),
        (np.bincount((goes[:, 1] - goes[:, 0]) % 10, minlength=10)[1:], 1000 / 9),
    ]:
        assert ((counts - expected) ** 2 / expected).sum() < 30
    # The largest corpora there are.
    far = permuted(np.arange(10**12, 10**12 + 5), 10**12 + 5, seed=(1,))
    assert len(set(far.tolist())) == 5
    assert far.max() < 10**12 + 5


def test_large_vocabularies(data, corpus, tmp_path):
    """Token numbers that do not fit 16 bits; and tokenizers that are given."""
    folder = tmp_path / "large"
    folder.mkdir()
    numbers = json.loads((corpus.path / "encoder.json").read_text())
    del numbers[EOS]
    shifted = {f"unused{i}": i for i in range(66_000)} | {t: 66_000 + i for i, t in enumerate(numbers)}
    (folder / "encoder.json").write_text(json.dumps(shifted))
    shutil.copy(corpus.path / "vocab.bpe", folder)
    with pytest.raises(StoreError, match=r"has no '<\|endoftext\|>'"):
        prepare([data], bpe=folder, out=tmp_path)
    (folder / "encoder.json").write_text(json.dumps(shifted | {EOS: len(shifted)}))
    large = prepare([data], bpe=folder, out=tmp_path)
    batch = next(large.in_order(1, 3000))
    assert large._stream("validation").shards[0].dtype == np.uint32
    found = "".join(HELD_OUT)
    assert large.tokenizer.decode(batch.tokens[0][batch.tokens[0] != large.tokenizer.eos]) == found
    assert (folder / "encoder.json").read_bytes() == (large.path / "encoder.json").read_bytes()


def test_nothing_to_read(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"x\ny\n")
    (tmp_path / "val.txt").write_bytes(b"")
    empty = prepare([tmp_path], bpe=257, out=tmp_path / "out")
    assert empty.index["splits"]["train"]["problems"]["not JSON"]["count"] == 2
    assert empty.tokens() == 0
    assert list(empty.in_order(2, 4)) == []
    with pytest.raises(ValueError, match="length: train has 0 tokens, too few for one window of 4"):
        empty.batch(0, 1, 4, seed=0)


def test_command_line(data, tmp_path, capsys):
    main(["lm", "prepare", str(data), "--bpe", str(SIZE), "--out", str(tmp_path)])
    out = capsys.readouterr().out
    assert "birds" in out
    assert "train: not JSON: 2 (train/a.jsonl.zst:61, train/b.jsonl:23)" in out
    assert "left out: 1 files (README.md)" in out
    (folder,) = tmp_path.iterdir()
    main(["lm", "show", str(folder)])
    (folder / "vocab.bpe").write_text("")
    with pytest.raises(SystemExit, match="1"):
        main(["lm", "show", str(folder)])
    assert "vocab.bpe: missing or damaged" in capsys.readouterr().err


def test_wrong_input_is_named(corpus, data, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="part: validation has birds, code; got 'cod'"):
        next(corpus.in_order(1, 8, part="cod"))
    with pytest.raises(ValueError, match="has no 'test', only train, validation"):
        corpus.tokens("test")
    with pytest.raises(ValueError, match=r"bpe: expected at least 257 tokens.*got 100"):
        prepare([data], bpe=100, out=tmp_path)
    with pytest.raises(StoreError, match=r"bpe: expected a folder with encoder.json and vocab.bpe"):
        prepare([data], bpe=data, out=tmp_path)
    with pytest.raises(ValueError, match="shard_tokens: expected at least 1, got 0"):
        prepare([data], out=tmp_path, shard_tokens=0)
    (tmp_path / "encoder.json").write_text("{}")
    (tmp_path / "vocab.bpe").write_text("")
    with pytest.raises(StoreError, match="not GPT-2's kind of vocabulary"):
        BPE(tmp_path)
    (tmp_path / "encoder.json").write_text("nonsense")
    with pytest.raises(StoreError, match="not the files of a byte-pair encoding"):
        BPE(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(StoreError, match=r"needs `pip install mesascope\[text\]`"):
        prepare([data], bpe=SIZE, out=tmp_path)
    # A prepared corpus needs neither.
    Corpus(corpus.path).batch(0, 1, 8, seed=0)
    store.read_json(corpus.path / "index.json")

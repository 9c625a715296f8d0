"""Readers, on what is well formed and on what is not."""

import io
import json
import random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mesascope.tasks import documents
from mesascope.tasks.documents import Document, Source, find_sources, read_documents


def lines(*texts, part="birds"):
    return b"".join(json.dumps({"text": t, "meta": {"pile_set_name": part}}).encode() + b"\n" for t in texts)


def packed(content):
    """Without a content size, as streams are written."""
    packer = zstandard.ZstdCompressor().compressobj()
    return packer.compress(content) + packer.flush()


RNG = random.Random(0)
TEXTS = ["".join(RNG.choices("abcdef ", k=100)) for _ in range(40)]
ARCHIVE = packed(lines(*TEXTS[:20]))


def read(path, content, from_line=1):
    path.write_bytes(content)
    return list(read_documents(Source(path, path.name, "train", "folder"), from_line))


def short(found):
    return [(d.text, d.part, d.line, d.problem) for d in found]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst"])
def test_every_line_is_accounted_for(tmp_path, suffix):
    content = b"".join(
        [
            b"\xef\xbb\xbf" + lines("first\u2028still first"),
            b"\n",
            b"{not json\n",
            b'{"body": "x"}\n',
            b'{"text": 3}\n',
            b"[1]\n",
            b'{"text": ""}\n',
            b'{"text": "a\xffb"}\r\n',
            b'{"text": "c\\ud800d", "meta": {"pile_set_name": 7}}\n',
            b"[" * 100_000 + b"\n",
            b"1" * 10_000 + b"\n",
            b'{"text": "\\ud83d\\ude00", "meta": null}',
        ]
    )
    bad_json, no_text = "not JSON", 'no string "text"'
    expected = [
        ("first\u2028still first", "birds", 1, ""),
        ("", "folder", 3, bad_json),
        ("", "folder", 4, no_text),
        ("", "folder", 5, no_text),
        ("", "folder", 6, no_text),
        ("", "folder", 7, "no text in it"),
        ("a\ufffdb", "folder", 8, "bad UTF-8 (replaced by U+FFFD)"),
        ("c\ufffdd", "folder", 9, "half a surrogate pair (replaced by U+FFFD)"),
        ("", "folder", 10, bad_json),
        ("", "folder", 11, bad_json),
        ("😀", "folder", 12, ""),
    ]
    whole = content if suffix == "jsonl" else packed(content[:40]) + packed(content[40:])
    path = tmp_path / f"x.{suffix}"
    found = read(path, whole)
    assert short(found) == expected
    assert found[-1].position == len(whole)
    assert short(read(path, whole, from_line=8)) == expected[6:]
    for document in found:
        document.text.encode()


def test_a_text_file_is_one_document(tmp_path):
    found = read(tmp_path / "x.txt", "\ufeffone\r\n\ntwö".encode())
    assert found == [Document("one\r\n\ntwö", "folder", 1, "", 13)]
    assert short(read(tmp_path / "y.txt", b"")) == [("", "folder", 1, "no text in it")]
    assert short(read(tmp_path / "z.txt", b"a\xff"))[0][3].startswith("bad UTF-8")


def test_archives_cut_anywhere(tmp_path):
    """What comes before the cut is read, and the cut is named."""
    texts, second = TEXTS, len(ARCHIVE)
    whole = ARCHIVE + packed(lines(*texts[20:]))
    for cut in range(0, len(whole), 7):
        if cut == second:
            continue  # a whole archive
        *read_before, last = read(tmp_path / "x.jsonl.zst", whole[:cut])
        assert [d.text for d in read_before] == texts[: len(read_before)]
        assert len(read_before) >= (20 if cut >= second else 0)
        assert (last.text, last.line) == ("", len(read_before) + 1)
        assert last.problem == "the archive is cut off here"
    assert [d.text for d in read(tmp_path / "x.jsonl.zst", whole)] == texts
    *before, last = read(tmp_path / "x.jsonl.zst", whole + b"and more")
    assert [d.text for d in before] == texts
    assert last.problem.startswith("the archive is damaged from here on")
    assert last.line == 41


def test_lines_too_long_to_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LONGEST_LINE", 1000)
    found = read(tmp_path / "x.jsonl", lines("a", "b" * 5000, "c"))
    assert short(found)[0::2] == [("a", "birds", 1, ""), ("c", "birds", 3, "")]
    assert (found[1].text, found[1].line) == ("", 2)
    assert found[1].problem.startswith("longer than")


def test_files_that_cannot_be_read(tmp_path):
    (found,) = read_documents(Source(tmp_path / "absent.jsonl", "absent.jsonl", "train", ""))
    assert found.problem == "cannot be read (No such file or directory)"


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300), suffix=st.sampled_from(["jsonl", "jsonl.zst", "txt"]))
def test_any_bytes(tmp_path_factory, content, suffix):
    """Nothing raises, and no line that holds anything is lost."""
    found = read(tmp_path_factory.getbasetemp() / f"any.{suffix}", content)
    assert all(d.text or d.problem for d in found)
    if suffix == "jsonl":
        assert [d.line for d in found] == [i for i, line in enumerate(io.BytesIO(content), 1) if line.strip()]
    if suffix == "txt":
        assert len(found) == 1


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 2 * len(ARCHIVE) - 1), value=st.integers(1, 255))
def test_a_changed_byte_in_an_archive(tmp_path_factory, at, value):
    """It is noticed or changes text, but never raises and never costs what comes before."""
    content = bytearray(ARCHIVE * 2)
    content[at] ^= value
    found = read(tmp_path_factory.getbasetemp() / "changed.jsonl.zst", bytes(content))
    if at >= len(ARCHIVE):
        assert [d.text for d in found[:20]] == TEXTS[:20]


def test_which_files(tmp_path):
    names = [
        "train/00.jsonl.zst", "train/01.jsonl.zst", "val.jsonl.zst", "test.jsonl", "validation_b/x.txt",
        "valley.txt", "deep/er/dev-1.txt", "SOURCES.md", ".hidden/x.txt", ".x.txt",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    sources, ignored = find_sources([tmp_path])
    assert {s.name: s.split for s in sources} == {
        "train/00.jsonl.zst": "train",
        "train/01.jsonl.zst": "train",
        "val.jsonl.zst": "validation",
        "test.jsonl": "test",
        "validation_b/x.txt": "validation",
        "valley.txt": "train",
        "deep/er/dev-1.txt": "validation",
    }
    assert ignored == ["SOURCES.md"]
    assert [s.part for s in sources if s.name == "deep/er/dev-1.txt"] == ["er"]
    assert [s.name for s in find_sources([tmp_path / "val.jsonl.zst", tmp_path / "train"])[0]] == [
        "val.jsonl.zst", "00.jsonl.zst", "01.jsonl.zst",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"data: there is no .*absent"):
        find_sources([tmp_path / "absent"])
    with pytest.raises(ValueError, match=r"data: expected \*.jsonl.zst, \*.jsonl, \*.txt or a folder, got"):
        find_sources([tmp_path / "SOURCES.md"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data: there is no \*.jsonl.zst"):
        find_sources([tmp_path / "empty"])

"""A small corpus of the tests' own."""

import pytest

from mesascope.tasks.text import Corpus, prepare
from tests.tasks.test_documents import lines
from tests.tasks.test_text import CODE, HELD_OUT, STORIES, story


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("data") / "shore"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines(*STORIES) + lines(*CODE, part="code"))
    held_out = [*HELD_OUT, *(story(i) for i in range(200, 220))]
    written = b"".join(lines(t, part="birds" if i % 3 else "code") for i, t in enumerate(held_out))
    (folder / "validation.jsonl").write_bytes(written)
    return prepare([folder], bpe=300, out=tmp_path_factory.mktemp("corpora"))

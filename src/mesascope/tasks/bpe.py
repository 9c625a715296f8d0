"""Byte-pair encoding of bytes, as GPT-2 has it: from GPT-2's own files, or trained on a corpus and stored like them."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from mesascope import store
from mesascope.store import StoreError
from mesascope.untrusted import LONGEST_INDEX

EOS = "<|endoftext|>"
FILES = ("encoder.json", "vocab.bpe")


@final
class BPE:
    """Text to token numbers and back. Every text can be encoded, and `EOS` in a text is not the token.

    Attributes:
        size: how many tokens there are.
        eos: the number of the one that stands between documents.
    """

    size: int
    eos: int

    def __init__(self, folder: str | Path):
        """The tokenizer whose `encoder.json` and `vocab.bpe` lie in this folder."""
        tokenizers = _library()
        paths = [str(Path(folder, name)) for name in FILES]
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            raise StoreError(f"bpe: expected a folder with {' and '.join(FILES)}; there is no {missing[0]}.")
        for path in paths:
            if (size := Path(path).stat().st_size) > LONGEST_INDEX:
                raise StoreError(f"{path}: expected at most {LONGEST_INDEX:,} bytes, got {size:,}.")
        try:
            model = tokenizers.models.BPE.from_file(*paths)
        except Exception as error:  # the library raises nothing more specific
            raise StoreError(f"{folder}: not the files of a byte-pair encoding ({error}).") from error
        self._tokenizer = tokenizers.Tokenizer(model)
        self._tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        numbers = self._tokenizer.get_vocab()
        absent = [c for c in tokenizers.pre_tokenizers.ByteLevel.alphabet() if c not in numbers]
        if absent or sorted(numbers.values()) != list(range(len(numbers))):
            raise StoreError(
                f"{folder}: not GPT-2's kind of vocabulary: it must have every byte, and no gaps."
            )
        if EOS not in numbers:
            raise StoreError(f"{folder}: the vocabulary has no {EOS!r} to put between documents.")
        self.size, self.eos = len(numbers), numbers[EOS]

    @classmethod
    def trained(cls, texts: Iterable[str], size: int, folder: Path) -> Self:
        """Merge the most frequent pair until there are `size` tokens; the same texts give the same files.

        Fewer tokens where no pair is left that occurs twice.
        """
        tokenizers = _library()
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        check_size(size)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            initial_alphabet=alphabet,
            special_tokens=[EOS],
            show_progress=False,
        )
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(texts, trainer)
        model = json.loads(tokenizer.to_str())["model"]
        numbers = dict(sorted(model["vocab"].items(), key=lambda item: item[1]))
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        store.write(folder / FILES[1], "\n".join(["#version: 0.2", *merges, ""]).encode())
        store.write(folder / FILES[0], json.dumps(numbers).encode())
        return cls(folder)

    def encode(self, text: str) -> np.ndarray:
        """Its tokens, without `eos`."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same for many, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Iterable[int] | np.ndarray) -> str:
        """The text; U+FFFD where the tokens end within a character."""
        return self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)


def check_size(size: int) -> None:
    """Of a vocabulary to be trained."""
    if size < 257:
        raise ValueError(f"bpe: expected at least 257 tokens, for 256 bytes and {EOS!r}; got {size}.")


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the tokenizer's files."""
    try:
        return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    except OSError as error:
        raise StoreError(
            f"bpe: expected a folder with {' and '.join(FILES)}; cannot read {error.filename}: {error.strerror}."
        ) from error


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise StoreError("text: needs `pip install mesascope[text]`.") from error
    return tokenizers

"""One reader, and files that atheris makes: what reaches new code of the reader is changed further.

`scripts/fuzz.py --atheris` starts this once for each reader (atheris ends the process it runs in).
"""

import argparse
import collections
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import atheris  # pyright: ignore[reportMissingImports]
except ImportError:
    sys.exit("--atheris: needs `pip install atheris` (Linux, CPython 3.11 to 3.13).")

# Where it matters what has been reached: the readers, and Python's own below them.
READERS = [
    "mesascope.untrusted", "mesascope.store", "mesascope.runs", "mesascope.released", "mesascope.experiments.results",
    "mesascope.experiments.reproduce", "mesascope.sweep.pieces", "mesascope.tasks.shards", "mesascope.tasks.text",
    "mesascope.tasks.bpe", "json", "zipfile", "tomllib",
]  # fmt: skip
with atheris.instrument_imports(include=READERS):
    from scripts import fuzz

SEEDS = 100
# A list that is repeated thousands of times, by us and not by the reader, would take its time.
LONGEST_CHANGED = 2**13


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", choices=list(fuzz.READERS), required=True)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--failures", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="write outcomes here")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp())  # removed by whoever started this: the process ends in the middle
    (work / "files").mkdir()
    (work / "corpus").mkdir()
    case = fuzz.Case(fuzz.READERS[given.reader], work / "files")
    knowing = fuzz.KNOWING[case.path.suffix]
    (work / "corpus" / "good").write_bytes(case.original)
    for i in range(SEEDS):
        content = knowing(case.original, np.random.default_rng([given.first, i]))
        if len(content) < 2**16:
            (work / "corpus" / str(i)).write_bytes(content)
    fuzz.limit_memory()
    outcomes: collections.Counter[str] = collections.Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def one(content: bytes) -> None:
        outcome, told = case.outcome(content)
        outcomes[outcome] += 1
        if outcome == "failed":
            fuzz.tell_failure(f"{given.reader}-atheris-{outcomes.total()}", told, content, given.failures)
        if outcomes.total() == given.cases:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            given.out.write_text(json.dumps({"outcomes": outcomes, "grown": grown * 1024}))
            os._exit(0)

    def changed(content: bytes, longest: int, seed: int) -> bytes:
        """By atheris; or by somebody who knows the format, checksums included."""
        if seed % 2 and len(content) < LONGEST_CHANGED:
            try:
                made = knowing(content, np.random.default_rng(seed))
                if len(made) <= longest:
                    return made
            except Exception:  # it has not got that format any more
                pass
        return atheris.Mutate(content, longest)

    options = [f"-seed={given.first + 1}", f"-max_len={2**16}", "-verbosity=0", f"-artifact_prefix={work}/"]
    atheris.Setup([sys.argv[0], *options, str(work / "corpus")], one, custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

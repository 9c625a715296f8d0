"""Files that atheris makes: what reaches new code of a reader is changed further.

`scripts/fuzz.py --atheris` starts this. Each reader has a process of its own, for atheris ends the one it runs in; all
run at once.
"""

import argparse
import collections
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

try:
    atheris: Any = importlib.import_module("atheris")
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


def memory(name: str) -> int:
    """Of this process: what it has (`VmRSS`), or the most it has had (`VmHWM`), in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def fuzz_reader(name: str, cases: int, work: Path, first: int, failures: Path | None) -> None:
    """Ends the process when it has read so many files, and leaves `outcomes.json` in the folder."""
    (work / "files").mkdir(parents=True)
    (work / "corpus").mkdir()
    case = fuzz.Case(fuzz.READERS[name], work / "files")
    knowing = fuzz.KNOWING[case.path.suffix]
    (work / "corpus" / "good").write_bytes(case.original)
    for i in range(SEEDS):
        content = knowing(case.original, np.random.default_rng([first, i]))
        if len(content) < 2**16:
            (work / "corpus" / str(i)).write_bytes(content)
    fuzz.limit_memory()
    outcomes: collections.Counter[str] = collections.Counter()
    start, most = memory("VmRSS"), 0

    def one(content: bytes) -> None:
        nonlocal most
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the peak from here on: of reading, and not of changing
        outcome, told = case.outcome(content)
        most = max(most, memory("VmHWM") - start)
        outcomes[outcome] += 1
        if outcome == "failed":
            fuzz.tell_failure(f"{name}-atheris-{outcomes.total()}", told, content, failures)
        if outcomes.total() == cases:
            (work / "outcomes.json").write_text(json.dumps([outcomes, most]))
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

    options = [f"-seed={first + 1}", f"-max_len={2**16}", "-verbosity=0", f"-artifact_prefix={work}/"]
    atheris.Setup([sys.argv[0], *options, str(work / "corpus")], one, custom_mutator=changed)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--first", type=int, required=True, help="seed")
    parser.add_argument("--failures", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="write outcomes by reader, and bytes, here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        works = {name: Path(folder, str(i)) for i, name in enumerate(fuzz.READERS)}
        processes = []
        for name, cases in fuzz.counts(given.cases).items():
            processes.append(os.fork())
            if processes[-1] == 0:
                fuzz_reader(name, cases, works[name], given.first, given.failures)
        ends = [os.waitpid(process, 0)[1] for process in processes]
        if any(ends):
            return 1  # it has said why
        found = {name: json.loads((work / "outcomes.json").read_text()) for name, work in works.items()}
    given.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

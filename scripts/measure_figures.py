"""How long figures take on this machine, each alone in a process of its own: src/mesascope/experiments/minutes.json.

python scripts/measure_figures.py --preset released     # every figure that this preset has, then all at once
python scripts/measure_figures.py fig4 fig6 --preset quick
python scripts/measure_figures.py lm-two-layers --preset quick --data corpora/NAME --keep measured
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mesascope import experiments
from mesascope.store import read_json, write_json

PATH = Path(experiments.__file__).with_name("minutes.json")
DONE = (0, 3)
"""Exit status: claims as committed, or not."""


def minutes(figures: list[str], preset: str, data: str | None, keep: Path | None) -> float | None:
    """From a fresh start; None if they cannot be computed."""
    kept = None if keep is None else keep / (figures[0] if figures else "all")
    if kept is not None and kept.exists():
        raise SystemExit(
            f"{kept} is there already: what takes how long from a fresh start cannot be measured in it."
        )
    with tempfile.TemporaryDirectory() if kept is None else contextlib.nullcontext(kept) as folder:
        command = [sys.executable, "-m", "mesascope", "reproduce", *figures, "--preset", preset]
        command += [] if data is None else ["--data", data]
        began = time.monotonic()
        done = subprocess.run(
            [*command, "--out", f"{folder}/report", "--runs", f"{folder}/runs"],
            capture_output=True,
            text=True,
            check=False,
        )
        took = (time.monotonic() - began) / 60
    if done.returncode in DONE and "claims" in done.stdout:
        return took
    print(done.stdout[-500:], done.stderr[-500:], sep="\n", file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*")
    parser.add_argument("--preset", default="released", choices=["smoke", "released", "quick"])
    parser.add_argument("--data", help="a prepared corpus, for language models")
    parser.add_argument("--keep", type=Path, help="folder for what is made: FIGURE/report and FIGURE/runs")
    given = parser.parse_args()
    known = read_json(PATH) if PATH.exists() else {}
    for name in given.figures or [*experiments.names(), "all"]:
        took = minutes([] if name == "all" else [name], given.preset, given.data, given.keep)
        if took is not None:
            known.setdefault(name, {})[given.preset] = round(took, 1)
            write_json(PATH, known)
        print(f"{name}: {'not possible' if took is None else f'{took:.1f} minutes'}", flush=True)


if __name__ == "__main__":
    main()

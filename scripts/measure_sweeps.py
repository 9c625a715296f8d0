"""How many pieces a minute a sweep does on this machine, with so many workers.

python scripts/measure_sweeps.py --workers 1 2 4
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = """
presets = ["{preset}"]
seeds = {pieces}
at_once = 1
[set]
"train.steps" = {steps}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--preset", default="linear-1")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {given.pieces} pieces of "
          f"{given.preset}, one seed, {given.steps} steps\n")  # fmt: skip
    print("| workers | seconds | pieces per minute | ÷ one worker |\n|--:|--:|--:|--:|")
    first = None
    for workers in given.workers:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "spec.toml")
            path.write_text(SPEC.format(**vars(given)))
            command = [sys.executable, "-m", "mesascope", "sweep", str(path), "--runs", folder]
            began = time.monotonic()
            subprocess.run(
                [*command, "--executor", f"local:{workers}"], check=True, stdout=subprocess.DEVNULL
            )
            seconds = time.monotonic() - began
        rate = 60 * given.pieces / seconds
        first = first or rate
        print(f"| {workers} | {seconds:.1f} | {rate:.1f} | {rate / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()

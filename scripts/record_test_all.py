"""Run every test that needs no GPU and record the outcome in docs/test-all.md.

Extra arguments go to pytest. Tests that measure time run last, one by one. The exit status is that of the first part
that fails; a failed run is recorded as well.
"""

import datetime
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "test-all.md"
SUMMARY = re.compile(
    r"\d+ (passed|failed|skipped|deselected|errors?|xfailed|xpassed)\b.* in [\d.]+s|no tests ran"
)


def run_pytest(marked: str, *arguments: str) -> tuple[int, str]:
    """Run the tests `marked` so, echo the output line by line, and return exit status and summary line."""
    command = [sys.executable, "-m", "pytest", "--color=no", "-m", marked, *arguments]
    summary = "pytest printed no summary line"
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if SUMMARY.search(line):
                summary = line.strip().strip("= ")
    return process.returncode, summary


def git_commit() -> str:
    """Return the commit hash, marked when tracked files other than the record differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        record = RECORD.relative_to(ROOT).as_posix()
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){record}")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return f"{commit} with uncommitted changes" if changed else commit


def main() -> int:
    commit = git_commit()
    status, summary = run_pytest("not gpu and not alone", *sys.argv[1:])
    status_alone, summary_alone = run_pytest("alone and not gpu", *sys.argv[1:], "-n", "0")
    status = status or status_alone
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(
        "# Last run of the full test suite\n\n"
        "Written by `make test-all`; not edited by hand.\n\n"
        "| | |\n|---|---|\n"
        f"| date | {date} |\n"
        f"| commit | {commit} |\n"
        f"| Python | {platform.python_version()} |\n"
        f"| jax | {version('jax')} |\n"
        f"| machine | {platform.system()} {platform.machine()} |\n"
        f"| exit status | {status} |\n"
        f"| pytest | {summary} |\n"
        f"| tests that measure time | {summary_alone} |\n",
        encoding="utf-8",
    )
    print(f"recorded in {RECORD.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())

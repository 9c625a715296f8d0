"""Run every test that needs no GPU and record the outcome in docs/test-all.md.

Extra arguments go to pytest. The exit status is pytest's; a failed run is recorded as well.
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


def run_pytest(arguments: list[str]) -> tuple[int, str]:
    """Run pytest, echo its output line by line, and return its exit status and its summary line."""
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "--color=no", *arguments]
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
    status, summary = run_pytest(sys.argv[1:])
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
        f"| pytest | {summary} |\n",
        encoding="utf-8",
    )
    print(f"recorded in {RECORD.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())

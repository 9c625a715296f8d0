"""Write the claims of results/claims.json and two figures into README.md; with --check, say whether they are there.

python scripts/show_results.py [--check]
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesascope.store import read_json

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
FIGURES = ("fig4", "fig7")


def row(claim: Mapping[str, Any]) -> str:
    """A claim as a line of a table."""
    ours = "" if claim["ours"] is None else f"{claim['ours']:.3g}"
    if claim["interval"]:
        ours += " ({:.3g} to {:.3g})".format(*claim["interval"])
    authors = "" if claim["authors"] is None else f"{claim['authors']:.3g}"
    verdict = f"**{claim['verdict']}**" if claim["verdict"] == "fails" else claim["verdict"]
    cells = (claim["id"], claim["claim"], claim["expected"], authors, ours, verdict)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def section(claims: Sequence[Mapping[str, Any]]) -> str:
    """What stands between the marks."""
    held = sum(claim["verdict"] == "holds" for claim in claims)
    images = "".join(f"![{name}](results/figures/{name}.png)\n" for name in FIGURES)
    return (
        f"{images}\n"
        f"{held} of {len(claims)} claims hold. Numbers are means over training seeds with 95% intervals.\n\n"
        "<details><summary>All claims</summary>\n\n"
        "| | claim | threshold | authors | ours | verdict |\n|---|---|---|---|---|---|\n"
        f"{''.join(row(claim) for claim in claims)}\n"
        "</details>\n"
    )


def updated(readme: str, claims: Sequence[Mapping[str, Any]]) -> str:
    """The README with this section in place of what stood between the marks."""
    before, mark, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"README.md: expected the lines {BEGIN!r} and {END!r}.")
    return before + BEGIN + section(claims) + END + after


def main() -> int:
    path = ROOT / "README.md"
    readme = path.read_text(encoding="utf-8")
    new = updated(readme, read_json(ROOT / "results" / "claims.json"))
    if "--check" in sys.argv[1:]:
        if new != readme:
            print("README.md does not show results/claims.json: python scripts/show_results.py")
        return int(new != readme)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

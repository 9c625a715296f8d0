"""Write the claims of results/arrays into results/claims.json, and them and two figures into README.md; with --check,
say whether they are there.

python scripts/show_results.py [--check]
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesascope import experiments
from mesascope.experiments.claims import ENOUGH
from mesascope.experiments.reproduce import of_the_repository
from mesascope.store import read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
FIGURES = ("fig4", "fig7")

Claim = Mapping[str, Any]


def is_met(check: Claim, value: float | None) -> bool:
    if value is None:
        return False
    return value >= check["at_least"] if check["at_most"] is None else value <= check["at_most"]


def shown(claim: Claim) -> Claim:
    """The number that a table shows: the first, or the first for which the claim fails."""
    missed = [
        check
        for check in claim["checks"]
        if not is_met(check, check["ours"])
        or sum(is_met(check, value) for value in check["by_seed"]) < ENOUGH * len(check["by_seed"])
    ]
    return missed[0] if claim["verdict"] == "fails" and missed else claim["checks"][0]


def table(head: str, rows: Sequence[Sequence[str]]) -> str:
    count = head.count("|") + 1
    lines = [head, "|".join(["---"] * count)]
    lines += [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def row(claim: Claim) -> list[str]:
    """A claim as a line of a table."""
    check = shown(claim)
    ours = "–" if check["ours"] is None else f"{check['ours']:.3g}"
    if check["interval"]:
        ours += " ({:.3g} to {:.3g})".format(*check["interval"])
    bound = f"≥ {check['at_least']:g}" if check["at_most"] is None else f"≤ {check['at_most']:g}"
    of = f"{check['what']} {bound}"
    if len(claim["checks"]) > 1:
        of += f" (one of {len(claim['checks'])})"
    seeds = [is_met(check, value) for value in check["by_seed"]]
    if claim["verdict"] == "fails" and len(seeds) > 1:
        ours += f", met by {sum(seeds)} of {len(seeds)} seeds"
    # Theirs is for the first number.
    authors = "" if check["authors"] is None else f"{check['authors']:.3g}"
    verdict = f"**{claim['verdict']}**" if claim["verdict"] == "fails" else claim["verdict"]
    return [claim["id"] + " +" * (not claim["registered"]), claim["claim"], of, ours, authors, verdict]


def summary(claims: Sequence[Claim]) -> list[list[str]]:
    """A line for each figure."""
    rows = []
    for name in dict.fromkeys(claim["figure"] for claim in claims):
        mine = [claim for claim in claims if claim["figure"] == name]
        fails = [claim["id"] for claim in mine if claim["verdict"] == "fails"]
        rows.append(
            [name, experiments.experiment(name).shows, f"{len(mine) - len(fails)} of {len(mine)}", ", ".join(fails)]
        )  # fmt: skip
    return rows


def section(claims: Sequence[Claim]) -> str:
    """What stands between the marks."""

    def tally(registered: bool) -> str:
        some = [claim for claim in claims if claim["registered"] is registered]
        return f"{sum(claim['verdict'] == 'holds' for claim in some)} of {len(some)}"

    images = "".join(f"![{name}](results/figures/{name}.png)\n" for name in FIGURES)
    head = "| claim | number and threshold | ours (95% interval) | authors | verdict"
    return (
        f"{images}\n"
        f"**{tally(True)} claims hold** that were written down, with their thresholds, before there were results; "
        f"of those added since (other controls, other measures: marked +), {tally(False)}. Models have five training "
        "seeds.\n\n"
        f"{table('figure | shows | claims hold | fail', summary(claims))}\n"
        "<details><summary>Every claim with its number</summary>\n\n"
        f"{table(head, [row(claim) for claim in claims])}\n"
        "</details>\n"
    )  # fmt: skip


def updated(readme: str, claims: Sequence[Claim]) -> str:
    """The README with this section in place of what stood between the marks."""
    before, mark, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"README.md: expected the lines {BEGIN!r} and {END!r}.")
    return before + BEGIN + section(claims) + END + after


def main() -> int:
    path, claims_path = ROOT / "README.md", ROOT / "results" / "claims.json"
    stored = [name for name in experiments.names() if (ROOT / "results" / "arrays" / f"{name}.json").exists()]
    claims = [claim for name in stored for claim in of_the_repository(name).claims]
    readme = path.read_text(encoding="utf-8")
    new = updated(readme, claims)
    if "--check" in sys.argv[1:]:
        off = new != readme or json.loads(json.dumps(claims)) != read_json(claims_path)
        if off:
            print("README.md and claims.json do not show results/arrays: python scripts/show_results.py")
        return int(off)
    write_json(claims_path, claims)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

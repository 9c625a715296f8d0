"""What the README shows is what the repository has, and its lines of Python run."""

import re
from pathlib import Path

import pytest
from scripts import show_results

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_shows_the_committed_claims():
    claims = show_results.read_json(ROOT / "results" / "claims.json")
    assert show_results.updated(README, claims) == README


def test_links_lead_somewhere():
    for document in (README, *(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))):
        folder = ROOT if document is README else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document):
            assert (folder / target).exists(), target


def test_a_claim_that_fails_shows_the_number_for_which_it_does():
    def check(ours: float, by_seed: list[float], authors: float | None = None) -> dict:
        return {
            "what": "a",
            "ours": ours,
            "interval": None,
            "at_most": 1.0,
            "at_least": None,
            "by_seed": by_seed,
            "authors": authors,
        }

    met, missed = check(0.5, [0.4, 0.6], 0.7), check(2.0, [0.5, 3.5])
    claim = {"id": "x", "claim": "y", "checks": [met, missed], "verdict": "fails", "registered": True}
    assert show_results.shown(claim) is missed
    assert show_results.row(claim)[2:] == ["a ≤ 1 (one of 2)", "2, met by 1 of 2 seeds", "", "**fails**"]
    assert show_results.row({**claim, "registered": False})[0] == "x +"
    assert show_results.row({**claim, "verdict": "holds"})[2:5] == ["a ≤ 1 (one of 2)", "0.5", "0.7"]


@pytest.mark.usefixtures("standard_promotion")
def test_its_lines_of_python_run():
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["out"].shape == (8, 1024, 64)
    assert names["newest"].shape == (8, 64)
    assert names["predictions"].shape == (64, 50, 10)
    assert "blocks.1.mixer.queries" in names["seen"]

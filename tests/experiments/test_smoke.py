"""Every figure from beginning to end, with models of six training steps: that it runs, not what it shows."""

import io
import json
import re

import pytest
from rich.console import Console

from mesascope import experiments
from mesascope.experiments.base import AS_WRITTEN
from mesascope.experiments.lab import SCALES
from mesascope.experiments.registered import REGISTERED
from mesascope.experiments.reproduce import redraw, reproduce
from mesascope.tasks.text import prepare
from tests.tasks.test_text import story

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Figures that share a model share its run."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """For language models: enough of it for windows of their length."""
    folder = tmp_path_factory.mktemp("text")
    for split, count in (("train", 400), ("validation", 200)):
        (folder / f"{split}.txt").write_text("\n".join(story(i) for i in range(count)))
    return prepare([folder], bpe=300, out=folder / "corpora").path


# Models as written are shown by one figure: the others differ from it as they do as run.
NAMES = [name for name in experiments.names() if not name.endswith(AS_WRITTEN) or name.startswith("fig7")]


@pytest.mark.parametrize("name", NAMES)
def test_from_beginning_to_end(name, shared, text, tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    (outcome,) = reproduce(
        [name], scale=SCALES["smoke"], out=tmp_path, run_directory=shared, data=text, console=console
    )
    assert outcome.panels
    drawn = {path.suffix for path in (tmp_path / "smoke" / "figures").glob(f"{name}.*")}
    assert drawn in ({".png", ".pdf"}, {".svg"}, {".png", ".pdf", ".svg"})
    claims = json.loads((tmp_path / "smoke" / "claims.json").read_text())
    ids = {claim["id"] for claim in claims}
    assert len(ids) == len(claims)
    assert ids >= REGISTERED.get(name, set())
    panels = {panel.letter for panel in outcome.panels}
    for claim in claims:
        assert claim["figure"] == name
        shown = set(re.findall("[A-Z]", claim["panel"]))  # "A", or "A, B" where a claim is about both
        assert shown
        assert shown <= panels
        assert claim["verdict"] in ("holds", "fails", "not testable at this preset")
    redraw([name], scale=SCALES["smoke"], out=tmp_path, console=console)

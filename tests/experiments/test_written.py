"""Figures with models as the paper's text has them."""

import pytest

from mesascope import experiments
from mesascope.experiments.lab import SCALES, Lab, NotReleasedError
from mesascope.experiments.panels import Curves
from tests.experiments.planted import planted
from tests.experiments.test_fig7 import GOOD

MAIN = [f"fig{number}" for number in range(2, 9)]


def test_every_main_figure_is_there():
    names = experiments.names()
    assert [name.removesuffix("-as-written") for name in names if name.endswith("-as-written")] == MAIN
    assert all(names.index(f"{name}-as-written") == names.index(name) + 1 for name in MAIN)


@pytest.mark.parametrize("name", MAIN)
def test_it_is_the_same_figure(name):
    figure, written = experiments.experiment(name), experiments.experiment(f"{name}-as-written")
    assert written.id == f"{name}-as-written"
    assert written.pieces.keys() == figure.pieces.keys()
    assert written.says == figure.says


@pytest.mark.usefixtures("standard_promotion")
def test_models_and_tasks_are_as_written(tmp_path):
    lab = Lab(SCALES["smoke"], runs=tmp_path)
    written = lab.as_written()
    assert lab.config("softmax-7").name == "softmax-7"
    config = written.config("softmax-7")
    assert config.name == "softmax-7-as-written"
    assert config.model.layer_norm
    assert config.task != lab.config("softmax-7").task
    trained = written.trained("linear-1")
    assert trained.config.name == "linear-1-as-written"
    (used,) = lab.inputs  # remembered by the lab that was asked
    assert used.startswith("runs/linear-1-as-written-")


def test_nothing_of_it_is_trained_live_or_taken_from_what_was_run(tmp_path):
    lab = Lab(SCALES["released"], runs=tmp_path)
    for name, piece in (("fig7", "full"), ("fig4", "one_layer"), ("fig3", "attention")):
        with pytest.raises(NotReleasedError, match="-as-written"):
            experiments.experiment(f"{name}-as-written").pieces[piece](lab)


def test_claims_are_those_of_the_figure_but_for_what_was_run():
    result = planted("fig7", GOOD)
    claims = {claim.id: claim for claim in experiments.experiment("fig7").claims(result)}
    written = experiments.experiment("fig7-as-written").claims(result)
    wanted = [name for name in claims if "-as-run" not in name]
    assert [claim.id for claim in written] == [f"{name}-as-written" for name in wanted]
    for claim, name in zip(written, wanted, strict=True):
        assert claim.figure == "fig7-as-written"
        assert claim.expected == claims[name].expected
        assert all(check.authors is None for check in claim.checks)


def test_curves_say_what_they_are():
    panels = experiments.experiment("fig7-as-written").panels(planted("fig7", GOOD))
    assert all(isinstance(panel, Curves) for panel in panels)
    assert {line.variant for panel in panels for line in panel.lines} == {"as_written"}

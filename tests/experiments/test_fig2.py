"""Figure 2 and the token probes: claims and panels on planted numbers."""

import numpy as np
import pytest

from mesascope.experiments import experiment
from mesascope.experiments.fig2 import KINDS, WIDTHS, width_name
from mesascope.experiments.reproduce import piece_path
from tests.experiments.planted import flips, planted

SPREAD = np.linspace(0.99, 1.01, 5)
BOUND = np.array([1e-4, 0.01, 0.5, 0.9, 1.0, 1.0, 1.0, 1.0])
LONG = np.array([1e-4, 0.01, 0.02, 0.05, 0.15, 0.4, 0.8, 0.9])


def by_layer(depth):
    """Layer 1 has the current token's features, layer 2 those of the previous one."""
    errors = np.ones((depth + 1, 8))
    errors[0, 0] = 0.5
    errors[1:, 0] = 0.01
    errors[2:, 1] = 0.1
    return errors


GOOD = {}
for kind, depth in (("softmax-7", 7), ("hybrid-mesa", 2)):
    GOOD |= {
        f"binding-{kind}": np.outer(SPREAD, BOUND),
        f"binding-{kind}_untrained": np.outer(SPREAD, np.r_[1e-4, np.full(7, 0.85)]),
        f"partial-{kind}": np.outer(SPREAD, LONG),
        f"nonlinear-{kind}": np.multiply.outer(SPREAD, by_layer(depth)),
        f"nonlinear-{kind}_unit": np.multiply.outer(SPREAD, by_layer(depth)[:, :2]),
    }
TOKENS = {
    **{f"binding-{kind}": GOOD[f"binding-{kind}"] for kind in KINDS},
    "binding-full-mesa": np.outer(SPREAD, np.r_[1e-3, np.full(7, 0.6)]),
    **{f"binding-{kind}_untrained": np.ones((5, 8)) for kind in (*KINDS, "full-mesa")},
    **{
        width_name(kind, width): np.outer(SPREAD, np.where(np.arange(8) < width // 10 + 1, 0.1, 0.9))
        for kind in KINDS
        for width in WIDTHS
    },
}


def changed(name, index, value):
    array = GOOD[name].copy()
    array[(slice(None), *index)] = value
    return {name: array}


@pytest.mark.parametrize("kind", KINDS)
def test_claims(kind):
    flips("fig2", GOOD, {})
    flips("fig2", GOOD, changed(f"binding-{kind}", (0,), 0.02), "fig2a-1")
    flips("fig2", GOOD, changed(f"binding-{kind}", (1,), 0.06), "fig2a-1")
    flips("fig2", GOOD, changed(f"binding-{kind}", (2,), 0.03), "fig2a-2")
    flips("fig2", GOOD, changed(f"binding-{kind}", (3,), 0.03), "fig2a-2")
    flips("fig2", GOOD, changed(f"partial-{kind}", (3,), 0.12), "fig2a-3")
    flips("fig2", GOOD, changed(f"partial-{kind}", ([1, 2],), 0.3), "fig2a-3")
    flips("fig2", GOOD, changed(f"partial-{kind}", (7,), 0.4), "fig2a-3")
    flips("fig2", GOOD, changed(f"binding-{kind}_untrained", (1,), 0.3), "fig2a-4")
    flips("fig2", GOOD, changed(f"nonlinear-{kind}", (1, 0), 0.1), "fig2b-1")
    flips("fig2", GOOD, changed(f"nonlinear-{kind}", (slice(1, 4), 1), 0.7), "fig2b-2")
    flips("fig2", GOOD, changed(f"nonlinear-{kind}_unit", (1, 0), 0.1), "fig2b-1-unit")


def test_of_layers_only_the_first_three_count():
    late = np.ones((8, 8))
    late[1:, 0], late[4:, 1] = 0.01, 0.01
    flips("fig2", GOOD, {"nonlinear-softmax-7": np.multiply.outer(SPREAD, late)}, "fig2b-2")


def test_claims_about_tokens():
    flips("si-tokens", TOKENS, {})
    flips("si-tokens", TOKENS, {"binding-full-mesa": TOKENS["binding-softmax-7"]}, "si-fullmesa-1")
    fewer = np.where(np.arange(8) < 1, 0.1, 0.9) * np.ones((5, 1))
    flips("si-tokens", TOKENS, {"partial-hybrid-mesa": fewer}, "si-embed-1")


def test_claims_about_tokens_wait_for_all_their_models():
    figure = experiment("si-tokens")
    full = {name: values for name, values in TOKENS.items() if name.startswith("binding-")}
    assert [claim.id for claim in figure.claims(planted("si-tokens", full))] == ["si-fullmesa-1"]
    assert [panel.letter for panel in figure.panels(planted("si-tokens", full))] == ["A"]
    narrow = {name: TOKENS[name] for name in TOKENS if name.startswith("partial-") and name[-2:] != "80"}
    narrow.pop(width_name("softmax-7", 30))
    result = planted("si-tokens", narrow)
    assert figure.claims(result) == []
    assert [len(panel.lines) for panel in figure.panels(result)] == [len(WIDTHS) - 1, len(WIDTHS)]


def test_panels():
    a, *b = experiment("fig2").panels(planted("fig2", GOOD))
    assert [len(panel.lines) for panel in (a, *b)] == [5, 8, 3]
    panels = experiment("si-tokens").panels(planted("si-tokens", TOKENS))
    assert [len(panel.lines) for panel in panels] == [6, len(WIDTHS), len(WIDTHS)]
    assert all(line.x[0] == 0 and line.x[1] == -1 for line in a.lines)


def test_what_two_figures_share_is_computed_once(tmp_path):
    """Where it is kept is the same place, and it is the same function of the same model."""
    one = experiment("si-tokens")
    assert set(one.shared) == {"softmax-7", "hybrid-mesa", "softmax-7_80", "hybrid-mesa_80"}
    for name, (figure, there) in one.shared.items():
        mine, other = one.pieces[name], experiment(figure).pieces[there]
        assert (mine.func, mine.keywords) == (other.func, other.keywords)
        assert piece_path("si-tokens", name, tmp_path) == piece_path(figure, there, tmp_path)
    assert piece_path("si-tokens", "full-mesa", tmp_path) != piece_path("fig2", "full-mesa", tmp_path)

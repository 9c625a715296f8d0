"""Figures of language models: claims and panels on planted numbers."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from mesascope.cli import main
from mesascope.experiments import experiment, rates
from mesascope.experiments.claims import differences
from mesascope.experiments.lab import SCALES, Lab, NotReleasedError, OutOfTimeError
from mesascope.experiments.language import KEY_SHIFT, MIXERS
from mesascope.experiments.panels import Curves, Maps
from mesascope.experiments.rates import beyond, trial_of
from mesascope.experiments.reproduce import reproduce
from mesascope.experiments.results import Named, write
from mesascope.language import language_preset
from mesascope.provenance import made_with
from mesascope.runs import DivergedError
from mesascope.store import StoreError
from tests.experiments.planted import flips, planted, verdicts
from tests.language.test_presets import gpt2

SEEDS = np.array([-0.003, 0.0, 0.003])
UNTESTED = "not testable at this preset"


def model(name, loss, score, **others):
    curve = loss + np.outer(np.ones(3), [2.0, 1.0, 0.0])
    arrays = dict(
        tokens=[0, 1e6, 2e6], loss=curve, in_context=score - np.outer(np.ones(3), [1.0, 0.1, 0.0]),
        final_loss=loss + SEEDS, final_in_context=score + SEEDS, by_position=np.full((3, 40), loss),
        rates=[[1e-3, 3e-3], [loss, loss + 1]], at=[50, 500], final_in_context_smooth=score + SEEDS,
        train_loss=curve - 0.1, parts_loss=np.full((3, 2), loss), parts_names=list(b"birds\ncode"),
    )  # fmt: skip
    return {f"{name}_{what}": np.asarray(values, float) for what, values in (arrays | others).items()}


LOSSES = {"softmax": 4.0, "linear": 4.3, "mesa": 4.02, "delta": 4.1, "mesa-forget": 4.0}
LAYERS = {k: v for name, loss in LOSSES.items() for k, v in model(name, loss, loss - 4.5).items()}
KEYS = model("softmax", 4.2, -0.5)
for nu in range(4):
    KEYS |= model(f"mesa-nu{nu}", 4.4 - 0.05 * nu, -0.4 - 0.03 * nu)
    KEYS |= model(f"linear-nu{nu}", 4.6 - 0.05 * nu, -0.2 - 0.03 * nu)
MASS = np.zeros((3, 4, 32))
MASS[:, :, 0], MASS[:, 1, 2] = 0.3, 0.7
COPYING = {f"{d}-{m}_offsets": MASS for d in ("two", "four") for m in ("softmax", "linear", "mesa")}
COPYING["maps"] = np.tile(np.eye(8, k=-1), (4, 1, 1))


def test_good_numbers_hold():
    for figure, good in (
        ("lm-keyshift", KEYS), ("lm-two-layers", LAYERS), ("lm-four-layers", LAYERS), ("lm-attention", COPYING),
    ):  # fmt: skip
        flips(figure, good, {})


@pytest.mark.parametrize(
    ("name", "by", "ids"),
    [
        ("mesa-nu1_final_loss", 0.3, ("lm-1",)),
        ("mesa-nu2_final_in_context", 0.3, ("lm-2",)),
        ("mesa-nu2_final_in_context_smooth", 0.3, ("lm-2-smooth",)),
        ("softmax_final_in_context_smooth", -0.2, ("lm-6-smooth",)),
        ("linear-nu3_final_loss", 0.2, ("lm-3",)),
        ("softmax_final_in_context", -0.2, ("lm-6",)),
    ],
)
def test_key_shift_claims(name, by, ids):
    flips("lm-keyshift", KEYS, {name: KEYS[name] + by}, *ids)


def test_layers_claims():
    worse = {"mesa_final_loss": LAYERS["mesa_final_loss"] + 0.4}
    flips("lm-two-layers", LAYERS, worse, "lm-1-two-layers", "lm-4")
    flips("lm-four-layers", LAYERS, worse, "lm-1-four-layers", "lm-5")
    # Softmax may be the worst.
    flips(
        "lm-four-layers",
        LAYERS,
        worse | {"softmax_final_loss": LAYERS["softmax_final_loss"] + 1},
        "lm-1-four-layers",
    )
    flips("lm-two-layers", LAYERS, {"mesa_final_loss": LAYERS["mesa_final_loss"] + 0.1}, "lm-4")
    score = {"mesa_final_in_context": LAYERS["linear_final_in_context"] + 0.01}
    flips("lm-two-layers", LAYERS, score, "lm-2-two-layers")


def test_an_interval_that_holds_zero_is_no_difference():
    """Lower on average, and by two seeds of three even clearly."""
    noisy = LAYERS["linear_final_loss"] + np.array([-0.3, -0.3, 0.25])
    assert verdicts("lm-two-layers", LAYERS | {"mesa_final_loss": noisy})["lm-1-two-layers"] == "fails"
    one = {
        name: values[:1] if values.ndim and len(values) == 3 else values for name, values in LAYERS.items()
    }
    assert set(verdicts("lm-two-layers", one).values()) == {UNTESTED}


def test_a_head_that_looks_at_its_own_token_copies_nothing():
    own = np.zeros_like(MASS)
    own[..., 0] = 0.9
    flips("lm-attention", COPYING, {"four-mesa_offsets": own}, "lm-7")


def test_panels():
    for figure, arrays, kinds in (("lm-keyshift", KEYS, KEY_SHIFT), ("lm-four-layers", LAYERS, MIXERS)):
        panels = experiment(figure).panels(planted(figure, arrays))
        assert [panel.letter for panel in panels] == ["A", "B", "C", "D", "E", "F"]
        assert all(len(panel.lines) == len(kinds) for panel in panels)
        assert panels[1].ylabel == "loss at token 500 minus token 50"
        np.testing.assert_allclose(panels[2].lines[0].y, arrays["softmax_by_position"])
        assert panels[4].x_ticks == {0.0: "birds", 1.0: "code"}
        assert panels[5].lines[0].x.tolist() == [1e-3, 3e-3]
    maps, *curves = experiment("lm-attention").panels(planted("lm-attention", COPYING))
    assert isinstance(maps, Maps)
    assert len(maps.maps) == 4
    assert all(isinstance(panel, Curves) for panel in curves)
    assert curves[0].lines[0].y[:, 2].tolist() == [0.7] * 3


def test_without_text(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(StoreError, match=r"lm-two-layers: language models need text.*--preset quick --data"):
        reproduce(
            ["lm-two-layers"], scale=SCALES["quick"], out=tmp_path, run_directory=tmp_path, console=console
        )
    with pytest.raises(NotReleasedError):
        experiment("recall").pieces["mesa"](Lab(SCALES["released"]))


def test_recall_claims():
    sizes = np.array([4.0, 8.0])
    good = {
        f"{m}_state": (2 if m == "mesa" else 1) * sizes**2 for m in ("softmax", "linear", "delta", "mesa")
    }
    good |= {f"{m}_accuracy": np.add([[0.0], [0.01]], np.full((2, 2), a)) for m, a in
             (("softmax", 0.9), ("linear", 0.5), ("delta", 0.7), ("mesa", 0.8))}  # fmt: skip
    good |= {f"{m}_width": sizes for m in ("softmax", "linear", "delta", "mesa")}
    flips("recall", good, {})
    flips("recall", good, {"mesa_accuracy": good["mesa_accuracy"] - 0.5}, "recall-1", "recall-2")
    flips("recall", good, {"delta_accuracy": good["delta_accuracy"] + 0.2}, "recall-2")
    # Better at the same width, but not with as many numbers: 32 of them are half way from 16 to 64.
    better = {
        "linear_accuracy": np.array([[0.4, 0.8], [0.4, 0.81]]),
        "delta_accuracy": np.array([[0.45, 0.85], [0.45, 0.86]]),
        "mesa_accuracy": np.array([[0.5, 0.9], [0.5, 0.9]]),
    }
    flips("recall", good, better, "recall-1")
    # Better on average, but only by one of two seeds.
    flips("recall", good, {"mesa_accuracy": np.array([[0.51, 0.51], [0.9, 0.9]])}, "recall-1", "recall-2")
    one = {name: values[:1] if values.ndim == 2 else values for name, values in good.items()}
    assert verdicts("recall", one) == dict.fromkeys(("recall-1", "recall-2"), UNTESTED)
    panels = experiment("recall").panels(planted("recall", good))
    for panel, mesa in zip(panels, ([32, 128], [4, 8]), strict=True):
        assert [line.label for line in panel.lines] == ["softmax", "linear", "delta", "mesa"]
        assert panel.lines[3].x.tolist() == mesa


@pytest.mark.parametrize(
    ("figure", "arrays", "names", "ids", "verdict"),
    [
        (
            "lm-two-layers",
            LAYERS,
            ("mesa", "linear"),
            {"lm-1-two-layers", "lm-2-two-layers", "lm-2-smooth-two-layers"},
            "holds",
        ),
        ("lm-two-layers", LAYERS, ("mesa", "softmax"), {"lm-4"}, "holds"),
        ("lm-four-layers", LAYERS, ("delta",), set(), None),
        ("lm-keyshift", KEYS, ("mesa-nu3", "softmax"), {"lm-6", "lm-6-smooth"}, "holds"),
        ("lm-keyshift", KEYS, ("mesa-nu0", "linear-nu0"), {"lm-1", "lm-2", "lm-2-smooth"}, UNTESTED),
        ("lm-keyshift", KEYS, ("mesa-nu0", "mesa-nu3"), {"lm-3"}, UNTESTED),
        ("lm-attention", COPYING, ("two-mesa",), {"lm-7"}, UNTESTED),
    ],
)
def test_some_models_are_enough_to_draw_and_to_check_what_they_show(figure, arrays, names, ids, verdict):
    """But a claim about several waits for all of them."""
    some = {name: values for name, values in arrays.items() if name.rpartition("_")[0].startswith(names)}
    some = {name: values for name, values in some.items() if name.split("_")[0] in names}
    assert verdicts(figure, some) == dict.fromkeys(ids, verdict)
    panels = experiment(figure).panels(planted(figure, some))
    assert all(len(panel.lines) == len(names) for panel in panels)
    assert experiment(figure).in_parts


def test_a_figure_in_parts_is_drawn_and_published(tmp_path, capsys):
    """From pieces that another machine computed: no weights, no runs."""
    for name in ("mesa", "linear"):
        piece = {
            n: Named(np.asarray(v), ("axis",) * np.ndim(v))
            for n, v in LAYERS.items()
            if n.split("_")[0] == name
        }
        scale = {"name": "paper", "from_released": False}
        about = dict(arrays=list(piece), scale=scale, inputs={}, seconds=1.0, made=made_with())
        write(tmp_path / "out" / "paper" / "pieces" / "lm-two-layers" / name, piece, about)
    where = {"--out": "out", "--runs": "runs", "--publish": "results"}
    options = [word for option, name in where.items() for word in (option, str(tmp_path / name))]
    main(["plot", "lm-two-layers", "--preset", "paper", *options])
    assert "softmax, delta, mesa-forget missing" in " ".join(capsys.readouterr().out.split())
    claims = json.loads((tmp_path / "results" / "claims.json").read_text())
    assert {claim["id"]: claim["verdict"] for claim in claims} == {
        "lm-1-two-layers": "holds", "lm-2-two-layers": "holds", "lm-2-smooth-two-layers": "holds",
    }  # fmt: skip
    assert (tmp_path / "results" / "arrays" / "lm-two-layers.npz").exists()


def test_claims_about_more_models_than_the_committed_ones():
    some = {name: values for name, values in KEYS.items() if "nu0" in name}
    now, then = (
        [
            claim.to_dict(trained=True)
            for claim in experiment("lm-keyshift").claims(planted("lm-keyshift", arrays))
        ]
        for arrays in (KEYS, some)
    )
    assert differences(now, then)[:2] == [
        "lm-1: holds, committed is: not testable at this preset.",
        "lm-1: 8 numbers, committed are 2: it is about other models.",
    ]
    assert then[0]["claim"].endswith("(not measured yet: ν = 1, ν = 2, ν = 3)")
    assert differences(now, now) == differences(then, then) == []


def test_one_piece_of_a_figure(tmp_path, monkeypatch):
    """Those asked for are computed; the others are drawn if they are there, and not trained for that."""
    computed = []

    def piece(name):
        def compute(lab):
            computed.append(name)
            return {
                n: Named(np.asarray(v), ("axis",) * np.ndim(v))
                for n, v in LAYERS.items()
                if n.split("_")[0] == name
            }

        return compute

    figure = replace(experiment("lm-two-layers"), pieces={name: piece(name) for name in MIXERS})
    monkeypatch.setattr("mesascope.experiments.experiment", lambda name: figure)
    console = Console(file=io.StringIO(), width=200)
    options = dict(scale=SCALES["quick"], out=tmp_path, run_directory=tmp_path / "runs", console=console)
    reproduce(["lm-two-layers/mesa"], **options)
    (outcome,) = reproduce(["lm-two-layers/linear", "lm-two-layers/mesa"], **options)
    assert computed == ["mesa", "linear"]
    assert [line.label for line in outcome.panels[0].lines] == ["linear", "mesa"]
    with pytest.raises(
        ValueError, match=r"lm-two-layers/cosine: there is no such piece\. .* has softmax, linear"
    ):
        reproduce(["lm-two-layers/cosine"], **options)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="it is computed as a whole"):
        reproduce(["fig4/a"], **options)


# The search for a learning rate.


def test_trials_are_the_same_for_all_and_warm_up_as_slowly():
    config = language_preset("lm-2-mesa", gpt2, "gpu")
    trial = trial_of(config, 3e-3)
    rate = trial.train.optimizer.rate
    assert (trial.train.steps, rate.warmup, rate.end) == (305, 76, 305)
    assert (rate.peak, rate.floor) == (3e-3, pytest.approx(2e-3))
    assert (trial.train.seeds, trial.train.first_seed, trial.measured_on) == (1, 1000, "train")


def test_which_rate_is_beyond_the_edge():
    assert beyond({1e-3: 2.0, 3e-3: 1.0, 1e-2: 3.0}) is None
    assert beyond({1e-3: 2.0, 3e-3: 1.0}) == pytest.approx(9e-3)
    assert beyond({1e-3: 0.5, 3e-3: 1.0}) == pytest.approx(3e-4)
    assert beyond({1e-3: np.inf, 3e-3: np.inf}) is None


class Trials:
    """In place of `fit`: losses by rate, with a clock."""

    def __init__(self, losses, minutes=1.0):
        self.losses, self.minutes, self.now, self.given = losses, minutes, 0.0, []

    def __call__(self, config, *, max_minutes=None, weights=True, **_):
        assert not weights
        self.given.append((config.train.optimizer.rate.peak, max_minutes))
        self.now += 60 * self.minutes
        loss = self.losses(config.train.optimizer.rate.peak)
        if not np.isfinite(loss):
            raise DivergedError("diverged")
        finished = max_minutes is None or max_minutes >= self.minutes
        return SimpleNamespace(finished=finished, result={"loss": [loss]}, config=config, path=Path("x"))


def test_a_search_within_a_deadline(tmp_path, monkeypatch):
    """Each trial has the time that is left, not that of the beginning."""
    config = language_preset("lm-2-mesa", gpt2, "cpu")
    trials = Trials(lambda rate: abs(np.log(rate / 1e-3)))
    monkeypatch.setattr(rates, "fit", trials)
    monkeypatch.setattr(rates.time, "monotonic", lambda: trials.now)
    with pytest.raises(OutOfTimeError):
        rates.search_rates(config, runs=tmp_path, deadline=150.0)
    assert [left for _, left in trials.given] == pytest.approx([2.5, 1.5, 0.5])
    told = Console(file=io.StringIO(), width=200)
    assert rates.best(rates.search_rates(config, runs=tmp_path, console=told)) == 1e-3
    assert not told.file.getvalue()
    trials.losses = lambda rate: abs(np.log(rate / 2e-2))
    assert list(rates.search_rates(config, runs=tmp_path, console=told))[4:] == pytest.approx([0.03, 0.09])
    assert not told.file.getvalue()
    trials.losses = lambda rate: 1 / rate
    found = rates.search_rates(config, runs=tmp_path, console=told)
    assert list(found) == [3e-4, 1e-3, 3e-3, 1e-2, pytest.approx(0.03), pytest.approx(0.09)]
    assert "the best rate tried is 0.09, at the edge" in told.file.getvalue()


def test_what_diverges_is_halved_and_not_tried_again(tmp_path, monkeypatch):
    config = language_preset("lm-2-mesa", gpt2, "cpu")
    whole = config.train.steps
    trials = Trials(lambda rate: abs(np.log(rate / 3e-3)))
    short = trials.__call__

    def fit(config, **options):
        if config.train.steps == whole and config.train.optimizer.rate.peak > 1e-3:
            trials.given.append((config.train.optimizer.rate.peak, None))
            raise DivergedError("diverged")
        return short(config, **options)

    monkeypatch.setattr(rates, "fit", fit)
    lab = Lab(SCALES["paper"], runs=tmp_path)
    for _ in range(2):
        run, losses = rates.train_at_best(lab, config)
        assert run.config.train.optimizer.rate.peak == pytest.approx(7.5e-4)
        assert rates.best(losses) == 3e-3
    diverged = [rate for rate, _ in trials.given if rate in (3e-3, 1.5e-3)]
    assert diverged.count(1.5e-3) == 1

"""The machinery around figures, with a figure of its own: what is kept, what is computed again, what is refused."""

import contextlib
import dataclasses
import io
import json
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from mesascope import experiments, released
from mesascope.experiments import lab, results
from mesascope.experiments import reproduce as machinery
from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.lab import SCALES, Lab, NotReleasedError, OutOfTimeError
from mesascope.experiments.panels import Curves, Line, Maps, blend, draw
from mesascope.experiments.results import Named, Result
from mesascope.presets import preset
from mesascope.runs import DivergedError
from mesascope.store import StoreError, read_metadata, with_field, write_arrays
from mesascope.training import WarmupCosine

SMOKE = SCALES["smoke"]


@pytest.fixture
def console():
    return Console(record=True, width=200, file=io.StringIO())


class Figure:
    """Two pieces that count how often they are asked for."""

    def __init__(self):
        self.calls = []

    def first(self, lab):
        self.calls.append("first")
        return {"first": Named.of(np.arange(6.0).reshape(2, 3), "seed", "time")}

    def second(self, lab):
        self.calls.append("second")
        if lab.scale.from_released:
            raise NotReleasedError("the weights of nothing")
        return {"second": Named.of(np.eye(3), "row", "column")}

    def panels(self, result):
        line = Line(label="a", x=np.arange(3), y=result["first"], origin=result.origin["first"])
        maps = Maps(letter="B", title="b", maps={"m": result["second"]}, diverging=True)
        return [Curves(letter="A", title="a", xlabel="t", ylabel="loss", lines=(line,)), maps]

    def claims(self, result):
        check = Check(what="trace", values=np.array([np.trace(result["second"])]), at_most=3.0)
        return [
            Claim(
                id="own-1", figure="own", panel="B", claim="c", source="s", checks=(check,), needs="nothing"
            )
        ]

    @property
    def experiment(self):
        return Experiment(
            id="own", shows="nothing", says="Nothing.", panels=self.panels, claims=self.claims,
            pieces={"first": self.first, "second": self.second},
        )  # fmt: skip


@pytest.fixture
def figure(monkeypatch):
    own = Figure()
    monkeypatch.setattr(experiments, "experiment", lambda name: own.experiment)
    monkeypatch.setattr(experiments, "names", lambda: ["own"])
    return own


@pytest.mark.faults
def test_finished_pieces_are_kept(tmp_path, figure, console):
    run = lambda **more: machinery.reproduce(scale=SMOKE, out=tmp_path, console=console, **more)  # noqa: E731
    (outcome,) = run()
    assert figure.calls == ["first", "second"]
    for kind in ("png", "pdf"):
        assert (tmp_path / "smoke" / "figures" / f"own.{kind}").stat().st_size > 1000
    (claim,) = json.loads((tmp_path / "smoke" / "claims.json").read_text())
    assert claim["verdict"] == "holds"
    assert claim["ours"] == 3.0
    assert "own-1" in console.export_text()

    again = run()
    assert figure.calls == ["first", "second"]
    np.testing.assert_array_equal(again[0].result["second"], outcome.result["second"])
    machinery.redraw((), scale=SMOKE, out=tmp_path, console=console)
    assert figure.calls == ["first", "second"]
    run(fresh=True)
    assert figure.calls == ["first", "second"] * 2

    # A damaged file is computed again, the other is not; and at another scale all is.
    (tmp_path / "smoke" / "pieces" / "own" / "second.npz").write_bytes(b"PK")
    run()
    assert figure.calls[4:] == ["second"]
    assert "computed again" in console.export_text()
    machinery.reproduce(scale=dataclasses.replace(SMOKE, sequences=8), out=tmp_path, console=console)
    assert figure.calls[5:] == ["first", "second"]


@pytest.mark.parametrize("released_too", [True, False])
def test_what_other_source_made_of_released_models_is_made_again(
    released_too, tmp_path, figure, console, monkeypatch
):
    monkeypatch.setattr(figure, "second", figure.first)
    scale = dataclasses.replace(SMOKE, from_released=released_too)
    for source in ("one", "one", "another"):
        monkeypatch.setattr(machinery.provenance, "source_hash", lambda parts=(), source=source: source)
        with contextlib.suppress(KeyError):  # panels of what is not there
            machinery.reproduce(["own"], scale=scale, out=tmp_path, console=console)
    assert len(figure.calls) == (4 if released_too else 2)


def test_half_a_figure_is_not_drawn(tmp_path, figure, console):
    machinery.reproduce(scale=SMOKE, out=tmp_path, console=console)
    (tmp_path / "smoke" / "pieces" / "own" / "second.json").unlink()
    with pytest.raises(StoreError, match=r"\(second missing\): mesascope reproduce own --preset smoke"):
        machinery.redraw((), scale=SMOKE, out=tmp_path, console=console)


def test_out_of_time(tmp_path, figure, console):
    with pytest.raises(OutOfTimeError):
        machinery.reproduce(scale=SMOKE, out=tmp_path, console=console, max_minutes=0.0)
    lab = Lab(SMOKE, deadline=time.monotonic() - 1)
    with pytest.raises(OutOfTimeError):
        lab.trained("linear-1")


def test_what_is_tuned_is_found_once_and_released(tmp_path, monkeypatch):
    monkeypatch.setattr(released, "directory", lambda: tmp_path / "results")
    found = []

    def find():
        found.append(1)
        return {"rate": 0.5, "eos": np.arange(6.0).reshape(2, 3)}

    def lab(scale=SMOKE):
        return Lab(scale, runs=tmp_path / "runs")

    first = lab()
    numbers = first.tuned("gd-1", find)
    assert numbers["rate"] == 0.5
    assert first.inputs == {"tuned/gd-1": first.digest("tuned/gd-1")}
    np.testing.assert_array_equal(lab().tuned("gd-1", find)["eos"], numbers["eos"])
    assert len(found) == 1
    # How layers are distilled is of no matter to what is no layer.
    shorter = dataclasses.replace(SMOKE, distill_steps=SMOKE.distill_steps + 1)
    lab(shorter).tuned("gd-1", find)
    assert len(found) == 1
    for scale in (SMOKE, shorter):
        lab(scale).tuned("distilled_x", find)
    assert len(found) == 3
    del found[1:]
    # Again where the scale is another, where it is for other models, and where the file is damaged.
    lab(dataclasses.replace(SMOKE, tune_steps=3)).tuned("gd-1", find)
    for model in ("one", "another", "another"):
        of = lab()
        of.inputs = {"runs/model": model}
        of.tuned("gd-1", find, by_seed=True)
    assert len(found) == 4
    path = tmp_path / "runs" / ".tuned" / "smoke" / "gd-1.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    lab().tuned("gd-1", find)
    assert len(found) == 5
    # Released: what belongs to models is not found again.
    with pytest.raises(NotReleasedError, match="gd-1"):
        lab(SCALES["released"]).tuned("gd-1", find, by_seed=True)
    about = {"one": first.about()}
    result = Result(figure="own", arrays={}, origin={}, about=about)
    lab().tuned("gd-1", find)
    outcome = machinery.Outcome(
        experiment=experiments.experiment("fig1"), result=result, panels=(), claims=()
    )
    machinery.publish([outcome], tmp_path / "results", tmp_path / "runs")
    np.testing.assert_array_equal(lab(SCALES["released"]).tuned("gd-1", find)["eos"], numbers["eos"])
    assert len(found) == 5


@pytest.mark.faults
def test_what_is_tuned_for_models_is_released_with_them_and_checked(tmp_path, monkeypatch):
    """Without weights it stays where it is; with those of another run it is an error, when published and when read."""
    results_, runs = tmp_path / "results", tmp_path / "runs"
    monkeypatch.setattr(released, "directory", lambda: results_)
    eos, weights = np.arange(6.0, dtype=np.float32).reshape(2, 3), np.arange(4.0, dtype=np.float32)
    weights_of_run = runs / "model-0123456789" / "weights.safetensors"
    write_arrays(weights_of_run, {"a": np.stack([weights, 2 * weights])})

    def tuned(scale, **inputs):
        of = Lab(scale, runs=runs)
        of.inputs = inputs
        return of, of.tuned("prompt", lambda: {"eos": eos}, by_seed=True)

    first, _ = tuned(SMOKE, **{"runs/model-0123456789": "of both"})
    outcome = machinery.Outcome(
        experiment=experiments.experiment("fig1"),
        result=Result(figure="own", arrays={}, origin={}, about={"one": first.about()}),
        panels=(),
        claims=(),
    )

    def publish():
        machinery.publish([outcome], results_, runs)

    path = results_ / "tuned" / "prompt.safetensors"
    publish()
    assert not path.exists()
    with pytest.raises(NotReleasedError, match="prompt"):
        tuned(SCALES["released"])
    released_weights = released.weights_path("model")
    write_arrays(released_weights, {"a": 3 * weights[None]})
    with pytest.raises(StoreError, match=r"model\.safetensors is not the first model of model-0123456789"):
        publish()
    assert not path.exists()
    write_arrays(released_weights, {"a": weights[None].astype(ml_dtypes.bfloat16)})
    publish()
    np.testing.assert_array_equal(tuned(SCALES["released"])[1]["eos"], eos[:1])

    # Where it is published again from what is published, it stays of the weights that it was tuned for.
    (runs / ".tuned" / "smoke" / "prompt.safetensors").write_bytes(path.read_bytes())
    weights_of_run.unlink()
    write_arrays(released_weights, {"a": 2 * weights[None]})
    publish()
    with pytest.raises(
        StoreError, match=r"prompt\.safetensors was tuned for other weights than are in .*model\.saf"
    ):
        tuned(SCALES["released"])
    released_weights.unlink()
    with pytest.raises(StoreError, match="tuned for other weights"):
        tuned(SCALES["released"])
    write_arrays(path, {"eos": eos[:1]}, about=json.dumps({"by_seed": True}))
    with pytest.raises(StoreError, match="does not say which weights it was tuned for"):
        tuned(SCALES["released"])


def test_released_prompts_and_layers_are_of_the_released_weights():
    lab, names = Lab(SCALES["released"]), []
    for path in sorted((released.directory() / "tuned").iterdir()):
        if json.loads(read_metadata(path)["about"])["by_seed"]:
            lab.tuned(path.stem, dict, by_seed=True)
            names.append(path.stem)
    assert {"prompt_icl-softmax-7", "prompt_icl-hybrid-mesa"} <= set(names)


def test_stored_arrays_stand_in_for_what_is_not_released(tmp_path, figure, console, monkeypatch):
    scale = SCALES["released"]
    monkeypatch.setattr(released, "directory", lambda: tmp_path / "results")
    with pytest.raises(StoreError, match="nor the arrays of the piece 'second'"):
        machinery.reproduce(["own"], scale=scale, out=tmp_path, console=console)
    assert machinery.reproduce(scale=scale, out=tmp_path, console=console) == []
    assert "left out, for the repository has no results of them: own." in console.export_text()
    outcomes = machinery.reproduce(scale=SMOKE, out=tmp_path, console=console)
    machinery.publish(outcomes, tmp_path / "results", tmp_path / "runs")
    (outcome,) = machinery.reproduce(scale=scale, out=tmp_path, console=console)
    assert outcome.result.origin == {"first": "recomputed", "second": "stored"}
    assert machinery.against_committed([outcome]) == []
    changed = json.loads((tmp_path / "results" / "claims.json").read_text())
    changed[0]["verdict"] = "fails"
    (tmp_path / "results" / "claims.json").write_text(json.dumps(changed))
    assert machinery.against_committed([outcome]) == ["own-1: holds, committed is: fails."]
    (tmp_path / "results" / "claims.json").unlink()
    assert machinery.against_committed([outcome]) is None


@pytest.mark.parametrize("name", ["linear-1", "linear-6", "partial-softmax-7", "sensitivity-hybrid-mesa"])
def test_quick_training_keeps_to_its_budget(name, monkeypatch):
    scale, whole = SCALES["quick"], preset(name).train
    config = Lab(scale).config(name)
    train = config.train
    part = train.steps / whole.steps
    assert part <= scale.steps
    assert train.steps * lab._gflop_per_step(config) <= 1.01 * scale.gflop
    rate, before = train.optimizer.rate, whole.optimizer.rate
    if isinstance(before, WarmupCosine):
        assert rate.warmup == max(1, round(part * before.warmup))
        assert rate.end == max(rate.warmup + 1, round(part * before.end))
    else:
        assert rate == before
    assert train.steps / lab.EVALUATIONS / 2 <= train.eval_every <= max(2, train.steps / lab.EVALUATIONS)
    assert (train.keep_every is None) == (whole.keep_every is None)
    assert Lab(SCALES["paper"]).config(name) == preset(name)
    # A run's name must not depend on the machine.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lab._at_scale.cache_clear()
    assert Lab(scale).config(name) == config


def test_a_limit_that_a_scale_does_not_set_changes_no_result():
    made = {"scale": dataclasses.asdict(SCALES["paper"]), "inputs": {}}
    del made["scale"]["gflop"]
    assert Lab(SCALES["paper"]).still_holds(made)
    assert not Lab(SCALES["quick"]).still_holds(made)


def test_claims_fit_a_terminal_and_say_what_they_miss():
    def check(what, *values):
        return Check(what=what, values=np.array(values), at_most=1.0)

    def claim(name, *checks):
        common = dict(
            figure="fig4", panel="A", claim="something that takes many words to say", source="Fig. 4"
        )
        return Claim(id=name, checks=checks, **common).to_dict(trained=True)

    claims = [
        claim("holds-1", check("a", 0.5, 0.6, 0.7, 0.8, 1.1)),
        claim("fails-mean", check("b", 2.0, 3.0), check("c", 0.5, 0.6)),
        claim("fails-seeds", check("d", 0.0, 0.0, 0.0, 1.1, 1.2), check("e", 0.5, 0.5, 0.5, 0.5, 1.5)),
        claim("fails-together", check("f", 2.0, 0, 0, 0, 0), check("g", 0, 2.0, 0, 0, 0)),
        claim("fails-nan", check("h", np.nan)),
    ]
    console = Console(record=True, width=80, file=io.StringIO())
    machinery.print_claims(claims, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    below = " ".join(text[text.rindex("fails-mean") :].split())
    for line in (
        "fails-mean b: 2.5, expected ≤ 1 (met by 0 of 2 seeds)",
        "fails-seeds d: 0.46, expected ≤ 1 (met by 3 of 5 seeds)",
        "fails-together f: 0.4, expected ≤ 1 (met by 4 of 5 seeds)",
        "fails-together g: 0.4, expected ≤ 1 (met by 4 of 5 seeds)",
        "fails-nan h: not a number, expected ≤ 1",
    ):
        assert line in below
    assert " c: " not in below
    assert " e: " not in below


def test_one_seed_is_computed_again_and_the_others_are_stored():
    stored = {"a": Named.of(np.zeros((5, 3)), "seed", "time"), "b": Named.of(np.zeros(3), "time")}
    new = {"a": Named.of(np.ones((1, 3)), "seed", "time"), "b": Named.of(np.ones(3), "time")}
    whole, origin = results.spliced(stored, new)
    assert origin == {"a": "one seed recomputed", "b": "recomputed"}
    with pytest.raises(
        StoreError, match=r"a: expected the form of the stored array.*to be computed and published anew"
    ):
        results.spliced(stored, {"a": Named.of(np.ones((1, 4)), "seed", "time")})
    np.testing.assert_array_equal(whole["a"].values.sum(1), [3, 0, 0, 0, 0])
    np.testing.assert_array_equal(whole["b"].values, 1)


def test_arrays_come_back(tmp_path):
    arrays = {"a": Named.of(np.arange(6.0).reshape(2, 3), "seed", "time"), "b": Named.of(np.float64(2))}
    results.write(tmp_path / "x", arrays, {"seconds": 1})
    found, about = results.read(tmp_path / "x")
    assert about == {"seconds": 1}
    for name, array in arrays.items():
        assert found[name].axes == array.axes
        np.testing.assert_array_equal(found[name].values, array.values)
    results.write(tmp_path / "x.5", {}, {})
    assert results.read(tmp_path / "x")[0].keys() == arrays.keys()
    (tmp_path / "x.npz").unlink()
    with pytest.raises(StoreError, match="missing or damaged"):
        results.read(tmp_path / "x")
    with pytest.raises(ValueError, match="expected 2 names"):
        Named.of(np.zeros((2, 3)), "time")
    # What only a pickle could hold is refused.
    np.savez(tmp_path / "x.npz", a=np.array([{}], object), b=np.zeros(()))
    with pytest.raises(StoreError, match="damaged"):
        results.read(tmp_path / "x")


def test_scales():
    paper, smoke = Lab(SCALES["paper"]), Lab(SMOKE)
    assert paper.config("softmax-7").train.steps == 10_000
    assert paper.config("softmax-7").train.seeds == 5
    kept = smoke.config("interpolation-1").train
    assert kept.steps == 6
    assert kept.seeds == 2
    assert kept.keep_every == 2
    with pytest.raises(NotReleasedError):
        Lab(SCALES["released"]).trained("partial-softmax-7-5")


def test_released_models_are_those_of_their_names(tmp_path):
    """Each comes with a configuration of its name, and loads; float32 bits survive, bfloat16 nearly."""
    assert {"linear-1", "softmax-7", "hybrid-mesa"} <= set(released.names())
    lab = Lab(SCALES["released"])
    for name in released.names():
        trained = lab.trained(name)
        assert trained.config.name == name
        assert trained.config.train.seeds == 1
        made = json.loads(read_metadata(released.weights_path(name))["made"])
        assert {"source", "git", "device", "precision"} <= made.keys()
    models, config = released.read_model(released.weights_path("linear-1"))
    for half, tolerance in ((False, 0), (True, 2**-8)):
        made = {"device": "a device", "command": ["/somewhere"]}
        released.write_model(tmp_path / "a.safetensors", models, config, made=made, half=half)
        assert json.loads(read_metadata(tmp_path / "a.safetensors")["made"]) == {"device": "a device"}
        again, same = released.read_model(tmp_path / "a.safetensors")
        assert same == config
        a, b = models.layers[0].queries, again.layers[0].queries
        np.testing.assert_allclose(a, b, rtol=tolerance)
        assert a.dtype == b.dtype


def test_lines_are_checked():
    with pytest.raises(ValueError, match="expected y by seed and x"):
        Line(label="a", x=np.arange(3), y=np.zeros(3))
    with pytest.raises(ValueError, match="kind: expected one of softmax"):
        Line(label="a", x=np.arange(3), y=np.zeros((1, 3)), kind="red")
    assert blend("#000000", 1.0) == "#000000"
    assert blend("#000000", 0.0) == "#bfbfbf"
    lines = (Line(label="a", x=np.arange(1, 4), y=np.ones((2, 3))),)
    panel = Curves(letter="A", title="a", xlabel="t", ylabel="y", lines=lines, log_x=True, log_y=True)
    assert len(draw([panel]).axes) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_rate_is_halved_where_models_diverge(tmp_path, monkeypatch):
    fast = with_field(Lab(SMOKE).config("linear-1"), "train.steps=20", "train.optimizer.rate.peak=3e38")
    monkeypatch.setattr(Lab, "config", lambda self, name: fast)
    with pytest.raises(DivergedError):
        Lab(SMOKE, runs=tmp_path).trained("linear-1", halvings=2)
    tried = [
        json.loads(path.read_text())["train"]["optimizer"]["rate"]["peak"]
        for path in tmp_path.glob("*/config.json")
    ]
    assert sorted(tried, reverse=True) == [3e38, 1.5e38, 0.75e38]


def test_programs_are_forgotten_before_there_are_too_many():
    """The real thing, that XLA aborts in a process that has compiled all figures, takes an hour: `test_smoke.py`."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux counts mappings")

    @jax.jit
    def program(x):
        return x + 1

    program(1)
    machinery.forget_programs(most=10**9)
    assert program._cache_size() == 1
    machinery.forget_programs(most=0)
    assert program._cache_size() == 0
    assert program(1) == 2


def test_a_panel_is_computed_with_its_figure():
    assert list(machinery.asked_for(["fig7b", "fig4", "fig7"])) == ["fig7", "fig4"]
    assert experiments.figure_of("fig7-as-written") == "fig7-as-written"
    for wrong in ("fig9", "fig9b", "fig7bb"):
        with pytest.raises(ValueError, match=f"there is no '{wrong}'"):
            experiments.experiment(experiments.figure_of(wrong))

"""Made-up outcomes with everything that a page can meet."""

import numpy as np

from mesascope.experiments.base import Experiment
from mesascope.experiments.claims import Check, Claim
from mesascope.experiments.panels import Curves, Drawing, Line, Maps
from mesascope.experiments.reproduce import Outcome
from mesascope.experiments.results import Named, Result

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 300 80"><style>text { fill: red }</style>'
    '<rect x="5" y="10" width="130" height="60" fill="none" stroke="black"/><text x="20" y="45">layer</text></svg>'
)


def made(device: str = "cpu (cpu)") -> dict:
    return {
        "mesascope": "0.1.0",
        "source": "0123456789abcdef",
        "git": "89abcdef0123+",
        "python": "3.11.7",
        "libraries": {"jax": "0.10.2", "equinox": "0.13.8", "numpy": "2.4.6"},
        "device": device,
        "started": "2026-05-04T10:11:12+00:00",
    }


def outcome(name: str, panels: tuple, claims: tuple, *, trained: bool = True, **texts: str) -> Outcome:
    arrays = {
        "loss": Named.of(np.arange(10.0).reshape(2, 5), "seed", "time"),
        "curve": Named.of(np.ones(4), "step"),
    }
    about = {
        "losses": {
            "arrays": ["loss"],
            "scale": {"name": "released", "sequences": 4096},
            "inputs": {"released/softmax-7": "ab" * 32},
            "seconds": 12.3,
            "made": made(),
        },
        "curves": {"arrays": ["curve"], "inputs": {}, "seconds": 900.0, "made": made("H200 (gpu)")},
    }
    experiment = Experiment(
        id=name,
        shows=texts.get("shows", "One layer of linear attention is one step of gradient descent"),
        says=texts.get(
            "says",
            "A single layer of linear self-attention, trained to predict the next token of a linear dynamical system, "
            "converges to one step of gradient descent on the least-squares loss of its context. Deeper models are "
            "described by as many steps of a preconditioned algorithm, and a mesa layer solves the problem in one.",
        ),
        pieces={"losses": lambda lab: {}, "curves": lambda lab: {}},
        panels=lambda result: list(panels),
        claims=lambda result: list(claims),
        minutes={"released": 1.5},
    )
    result = Result(figure=name, arrays=arrays, origin={"loss": "recomputed", "curve": "stored"}, about=about)
    return Outcome(
        experiment=experiment,
        result=result,
        panels=panels,
        claims=tuple(claim.to_dict(trained=trained) for claim in claims),
    )


def claim(name: str, figure: str, panel: str, text: str, *checks: Check, **more) -> Claim:
    return Claim(
        id=name, figure=figure, panel=panel, claim=text, source=f"Section 4, Figure {figure[3:]}{panel}",
        checks=checks, **more,
    )  # fmt: skip


def outcomes() -> list[Outcome]:
    """A figure of curves with both variants, several seeds and log axes; one of maps; a drawing; every verdict."""
    rng = np.random.default_rng(0)
    steps = np.arange(0, 5001, 100.0)
    time = np.arange(1, 51.0)

    def noisy(curve: np.ndarray, seeds: int, spread: float = 0.04) -> np.ndarray:
        wiggle = rng.normal(size=(seeds, len(curve))) * spread / 3
        return curve * np.exp(spread * rng.normal(size=(seeds, 1)) + wiggle)

    fall = 0.45 + 4.5 * np.exp(-steps / 700)
    broken = noisy(0.2 + 2 * np.exp(-time / 9), 5)
    broken[2, 10] = np.nan
    by_time = [4.9 * np.exp(-time / (14 - 2 * k)) + 0.35 - 0.05 * k for k in range(4)]
    a = Curves(
        letter="A", title="One layer while it is trained", xlabel="training step", ylabel="test loss", log_y=True,
        lines=(
            Line(label="linear attention", x=steps, y=noisy(fall, 5), kind="linear", origin="stored"),
            Line(label="linear attention", x=steps, y=noisy(1.3 * fall, 5), kind="linear", origin="stored",
                 variant="as_written"),
            Line(label="Proposition 1", x=steps, y=np.full((1, 51), 0.46), kind="theory", dashed=True),
            Line(label="interpolation </script><b>", x=steps[::5], y=noisy(fall, 5)[:, ::5] * 1.02, kind="compressed",
                 markers=True),
            Line(label="mesa layer", x=steps, y=noisy(fall - 0.4, 5), kind="mesa", origin="stored"),
        ),
    )  # fmt: skip
    b = Curves(
        letter="B", title="Loss by context length", xlabel="context length", ylabel="test loss", y_max=6.0,
        lines=(
            *(
                Line(label=f"{k} layers", x=time, y=noisy(by_time[i], 5), kind="linear", shade=i / 3)
                for i, k in enumerate((1, 2, 4, 6))
            ),
            Line(label="six steps of Proposition 2", x=time, y=by_time[3][None] * 1.05, kind="theory", dashed=True),
        ),
    )  # fmt: skip
    c = Curves(
        letter="C", title="With a seed that broke", xlabel="context length", ylabel="loss ratio", log_x=True,
        lines=(Line(label="softmax", x=time, y=broken, kind="softmax"),),
        x_ticks={1: "one", 10: "ten", 50: "fifty"},
    )  # fmt: skip
    attention = {
        f"layer {layer}, head {head}": np.tril(
            np.exp(-np.abs(np.subtract.outer(np.arange(20), np.arange(20)) - head))
        )
        for layer in (1, 2, 3)
        for head in (0, 1)
    }
    products = {str(k): rng.normal(size=(12, 12)) * 0.05 + k * np.eye(12) for k in (10, 2, 1)}
    wide = {"all heads": np.abs(rng.normal(size=(4, 30)))}
    wide["all heads"][1, 3] = np.nan
    maps = (
        Maps(letter="A", title="Attention of a trained model", maps=attention, xlabel="key", ylabel="query"),
        Maps(letter="B", title="Weight products", maps=products, diverging=True, origin="stored"),
        Maps(letter="C", title="A single map, wide", maps=wide, xlabel="time", ylabel="head"),
    )
    check = Check(
        what="final loss / best GD-1", values=np.array([1.012, 1.015, 1.011, 1.013, 1.019]), at_most=1.02,
        authors=1.009,
    )  # fmt: skip
    linear = (
        claim("fig4a-1", "fig4", "A", "One layer converges to one step of gradient descent.", check),
        claim("fig4a-2", "fig4", "A", "Interpolating with the compressed algorithm loses nothing.",
              Check(what="interpolated / trained", values=np.array([1.04, 1.02, 1.03, 1.05, 1.02]), at_most=1.01)),
        claim("fig4b-1", "fig4", "B", "Six layers behave as six steps & a mesa layer stays ahead.",
              Check(what="|mean loss / Proposition 2 - 1|", values=np.array([0.05]), at_most=0.1, authors=0.02),
              Check(what="rank correlation over depth", values=np.array([-0.93, -0.9]), at_most=-0.8),
              Check(what="linear-6 / mesa", values=np.array([1.9, 2.4]), at_least=1.0)),
        claim("fig4c-1", "fig4", "C", "A number that is not one.",
              Check(what="loss", values=np.array([np.nan, 1.0]), at_most=2.0)),
    )  # fmt: skip
    weights = (
        claim("fig3a-1", "fig3", "A", "The first layer attends to the current and the previous token.",
              Check(what="attention mass on {t, t−1}", values=np.array([0.00012, 0.0002]), at_least=0.8),
              Check(what="std over sequences", values=np.array([0.02, 0.03]), at_most=0.1)),
    )  # fmt: skip
    return [
        outcome(
            "fig1",
            (Drawing(letter="", title="The mechanism", svg=SVG),),
            (),
            shows="The mechanism in one picture",
        ),
        outcome("fig3", maps, weights, trained=False, shows="Weights and attention of trained models"),
        outcome("fig4", (a, b, c), linear),
    ]

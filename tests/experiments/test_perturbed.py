"""One released weight changed: the figure's numbers, and at least one claim's, must change with it."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from mesascope import experiments, released
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES, Lab, NotReleasedError
from mesascope.experiments.results import Arrays, Result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(1800)]

WITHOUT_MODELS = {"fig1", "si-noise"}
SMALL = dataclasses.replace(SCALES["released"], sequences=64, probe_sequences=1024, tune_steps=5)


def figure(name: str, runs) -> tuple[Arrays, dict[str, list[float | None]], set[str]]:
    """Arrays that depend on released models, claims if there are all arrays that they need, and those models."""
    experiment, arrays, others, used = experiments.experiment(name), {}, {}, set()
    lab = Lab(SMALL, runs=runs)
    for piece in experiment.pieces.values():
        lab.inputs = {}
        try:
            found = piece(lab)
        except NotReleasedError:
            continue
        models = {n.removeprefix("released/") for n in lab.inputs if n.startswith("released/")}
        used |= models
        (arrays if models else others).update(found)
    path = released.directory() / "arrays" / name
    stored = results.read(path)[0] if results.files(path)[1].exists() else {}
    whole, _ = results.spliced(stored, arrays | others)
    try:
        claims = experiment.claims(
            Result(figure=name, arrays=whole, origin=dict.fromkeys(whole, "recomputed"))
        )
    except KeyError:  # they need what is not released
        claims = []
    numbers = {
        claim.id: [check["ours"] for check in claim.to_dict(trained=True)["checks"]] for claim in claims
    }
    return arrays, numbers, used


def disturb(name: str) -> None:
    """Add its own size to the largest weight of the first matrix."""
    models, config = released.read_model(released.weights_path(name))
    leaves, tree = jax.tree.flatten(models)
    place = next(i for i, leaf in enumerate(leaves) if leaf.ndim >= 3)
    weights = np.array(leaves[place])
    weights.flat[np.argmax(np.abs(weights))] *= 2
    leaves[place] = weights
    released.write_model(released.weights_path(name), jax.tree.unflatten(tree, leaves), config, made={})


@pytest.mark.parametrize("name", sorted(set(experiments.names()) - WITHOUT_MODELS))
def test_a_changed_weight_shows(name, tmp_path, monkeypatch):
    shutil.copytree(released.directory(), tmp_path / "results")
    monkeypatch.setattr(released, "directory", lambda: tmp_path / "results")
    before, claims_before, used = figure(name, tmp_path / "runs")
    if not used:
        pytest.skip(f"no model of {name} is released")
    disturb(min(used))
    after, claims_after, _ = figure(name, tmp_path / "runs")
    assert before.keys() == after.keys()
    changed = [n for n in before if not np.array_equal(before[n].values, after[n].values, equal_nan=True)]
    assert changed
    if claims_before:
        assert any(claims_before[n] != claims_after[n] for n in claims_before)

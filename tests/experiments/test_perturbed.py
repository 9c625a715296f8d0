"""One released weight changed: the figure's numbers, and at least one claim's, must change with it."""

import dataclasses
import shutil
from collections.abc import Collection

import jax
import numpy as np
import pytest

from mesascope import experiments, released
from mesascope.experiments import results
from mesascope.experiments.lab import SCALES, Lab, NotReleasedError
from mesascope.experiments.results import Arrays, Result

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion"), pytest.mark.timeout(1800)]

WITHOUT_MODELS = {"fig1", "si-noise"}
WITHOUT_WEIGHTS: set[str] = set()
"""Figures that come with arrays alone."""
SMALL = dataclasses.replace(SCALES["released"], sequences=64, probe_sequences=1024, tune_steps=5)


def computed(name: str, lab: Lab, pieces: Collection[str]) -> dict[str, tuple[Arrays, set[str]]]:
    """Arrays of the pieces that can be computed from what is released, and the models that each reads."""
    found = {}
    for piece in pieces:
        lab.inputs = {}
        try:
            arrays = experiments.experiment(name).pieces[piece](lab)
        except NotReleasedError:
            continue
        found[piece] = arrays, {n.removeprefix("released/") for n in lab.inputs if n.startswith("released/")}
    return found


def claimed(name: str, pieces: dict[str, tuple[Arrays, set[str]]]) -> dict[str, list[float | None]]:
    """Numbers of the claims, where there are all arrays that they need."""
    path = released.directory() / "arrays" / name
    stored = results.read(path)[0] if results.files(path)[1].exists() else {}
    arrays = {n: array for found, _ in pieces.values() for n, array in found.items()}
    whole, origin = results.spliced(stored, arrays)
    try:
        claims = experiments.experiment(name).claims(Result(figure=name, arrays=whole, origin=origin))
    except KeyError:  # they need what is not released
        return {}
    return {claim.id: [check["ours"] for check in claim.to_dict(trained=True)["checks"]] for claim in claims}


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
    """Whichever of its models it is a weight of."""
    shutil.copytree(released.directory(), tmp_path / "results")
    monkeypatch.setattr(released, "directory", lambda: tmp_path / "results")
    lab = Lab(SMALL, runs=tmp_path / "runs")
    before = computed(name, lab, experiments.experiment(name).pieces)
    used = set().union(*(models for _, models in before.values()))
    if not used:
        stored = results.files(released.directory() / "arrays" / name)[1].exists()
        assert not stored or name in WITHOUT_WEIGHTS, "it has arrays, and no released model"
        pytest.skip(f"no model of {name} is released")
    claims = claimed(name, before)
    for model in sorted(used):
        weights = released.weights_path(model)
        shutil.copy(weights, tmp_path / "kept")
        disturb(model)
        after = computed(name, lab, [piece for piece, (_, models) in before.items() if model in models])
        shutil.copy(tmp_path / "kept", weights)
        for piece, (arrays, _) in after.items():
            then = before[piece][0]
            assert arrays.keys() == then.keys()
            assert any(
                not np.array_equal(arrays[n].values, then[n].values, equal_nan=True) for n in arrays
            ), piece
        if claims:
            numbers = claimed(name, before | after)
            assert any(claims[n] != numbers[n] for n in claims), model

"""Probes: against lstsq, on planted algorithms, and on models that have nothing to be found."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis.probes import Batch, probe, probe_checkpoints, probe_each, residual_stream
from mesascope.analysis.results import stack
from mesascope.analysis.targets import (
    exact_solution,
    hidden_state,
    next_token,
    past_tokens,
    preconditioned,
    sampler,
    stacked,
    teacher_features,
    without_outliers,
)
from mesascope.models import Transformer
from mesascope.tasks import Dynamics, Standard
from mesascope.theory.constructions import proposition_2
from mesascope.theory.solvers import MesaOptimizer, autoregressive, chebyshev_coefficients

N, T, STEPS, LAM = 3, 8, 3, 2.0
TASK = Dynamics.linear(state_dim=N, length=T)
LOW, HIGH = 1 / LAM, 16.0
ETA = 2 / (LOW + HIGH)
ALPHAS, BETAS = chebyshev_coefficients(ETA * LOW, ETA * HIGH, STEPS)
BUILT = proposition_2(N, STEPS, ALPHAS, BETAS, LAM, ETA, dtype=jnp.float64)
PATHS = residual_stream(STEPS + 1)


def activations(model, observations):
    return model.trace(BUILT.tokens(observations))[1]


@partial(jax.jit, static_argnums=1)
def untrained(first: int, count: int):
    """Random weights in the place of Proposition 2's."""
    seeds = first + jnp.arange(count)
    models = jax.vmap(lambda seed: Transformer(BUILT.model.config, key=jax.random.key(seed)))(seeds)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), models)


def iterates(observations: np.ndarray) -> np.ndarray:
    """Second-order Richardson iteration in numpy, one matrix at a time: [step + 1, batch, time, n]."""
    out = np.empty((STEPS + 1, *observations.shape))
    for b, sequence in enumerate(observations):
        gram = np.eye(N) / LAM
        for t, s in enumerate(sequence):
            if t:
                gram = gram + np.outer(sequence[t - 1], sequence[t - 1])
            x = before = s
            out[0, b, t] = x
            for l in range(STEPS):
                x, before = x + ALPHAS[l] * (s - ETA * gram @ x) + BETAS[l] * (x - before), x
                out[l + 1, b, t] = x
    return out


draw = jax.jit(TASK.sample, static_argnums=1)


def planted(key, batch_size):
    observations = np.asarray(draw(key, batch_size).observations, np.float64)
    found = iterates(observations[:, :-1])
    targets = {f"iterate {l}": x for l, x in enumerate(found)} | {"next": observations[:, 1:]}
    return Batch(jnp.asarray(observations[:, :-1]), targets)


def toy(model, tokens):
    mixed = jnp.tanh(tokens @ model["w"])
    return {"mixed": mixed, "sums": jnp.cumsum(mixed, 1), "scalar": jnp.sum(tokens)}


def remembering(model, tokens):
    past = model["memory"] * jnp.cumsum(tokens, 1)
    return {"memory": jnp.concatenate([jnp.tanh(tokens @ model["w"]), past], -1)}


def toys(seeds: int, first: int = 0):
    keys = jax.random.split(jax.random.key(first), seeds)
    return stack([{"w": jax.random.normal(k, (3, 5), jnp.float64)} for k in keys])


def noisy(key, batch_size):
    tokens = jax.random.normal(key, (batch_size, 4, 3), jnp.float64)
    past = jnp.cumsum(tokens, 1)
    return Batch(tokens, {"past": past, "first": past[..., :1]})


@pytest.mark.parametrize("trim", [False, True])
def test_probes_are_least_squares(trim):
    """Every number against numpy's lstsq, one layer, time and seed after the other."""
    batches = []

    def recorded(key, batch_size):
        batch = noisy(key, batch_size)
        if trim:
            batch = batch._replace(keep=jnp.sum(batch.tokens, -1) < 1.5)
        batches.append(batch)
        return batch

    found = probe(
        toys(2), recorded, untrained=toys(3, 9), activations=toy,
        sequences=120, batch_size=25, ridge=1e-14, key=jax.random.key(0),
    )  # fmt: skip
    assert found.paths == ("mixed", "sums")
    assert [len(b.tokens) for b in batches] == [20] * 6

    def join(part, get):
        return np.concatenate([np.asarray(get(b)) for b in part])

    fit, held = batches[:3], batches[3:]
    keep = [
        join(part, lambda b: np.ones((20, 4), bool) if b.keep is None else b.keep) for part in (fit, held)
    ]
    groups = {"error": toys(2), "untrained": toys(3, 9)}
    for name, models in groups.items():
        values = getattr(found, name).values
        for seed in range(values.shape[0]):
            model = {"w": models["w"][seed]}
            for j, path in enumerate(found.paths):
                a = [join(part, lambda b, p=path, m=model: toy(m, b.tokens)[p]) for part in (fit, held)]
                for i, target in enumerate(found.targets):
                    y = [join(part, lambda b, n=target: b.targets[n]) for part in (fit, held)]
                    for t in range(4):
                        x0, x1 = (a[s][keep[s][:, t], t] for s in (0, 1))
                        y0, y1 = (y[s][keep[s][:, t], t] for s in (0, 1))
                        decoder = np.linalg.lstsq(x0, y0)[0]
                        expected = 0.5 * np.mean(np.sum((x1 @ decoder - y1) ** 2, 1))
                        np.testing.assert_allclose(values[seed, i, j, t], expected, rtol=1e-8)
                        if name == "error":
                            inside = np.mean(np.sum((x0 @ decoder - y0) ** 2, 1))
                            flattering = found.in_sample[seed, i, j, t]
                            np.testing.assert_allclose(flattering, 0.5 * inside, rtol=1e-8, atol=1e-14)
                            relative = found.relative_in_sample[seed, i, j, t]
                            whole = np.mean(np.sum(y0**2, 1))
                            np.testing.assert_allclose(relative, inside / whole, rtol=1e-8, atol=1e-14)
                            relative = 2 * expected / np.mean(np.sum(y1**2, 1))
                            np.testing.assert_allclose(
                                found.relative.values[seed, i, j, t], relative, rtol=1e-8
                            )
    # The token has the first sum, and of later ones what it adds.
    of_input = found.relative_controls["input"].mean[0, 0]
    assert of_input[0] < 1e-20
    if not trim:
        assert abs(of_input[3] - 0.75) < 0.3
        # Targets of other sequences cannot be found: the error of predicting zero, and what fitting noise adds.
        assert np.all(found.relative_controls["shuffled"].mean > 0.8)


def test_planted_algorithm_lights_up_where_it_is():
    """The l-th iterate stands in the stream after l and l + 1 blocks, and nowhere else; the prediction at the end.

    (The last block, the gradient step, leaves the iterates where they are.)
    """
    found = probe(
        stack([BUILT.model]), planted, untrained=untrained(0, 4), activations=activations, paths=PATHS,
        sequences=512, batch_size=128, ridge=1e-13, key=jax.random.key(1),
    )  # fmt: skip
    error = found.relative.mean
    # Before the third token, systems have a rank so low that iterates are multiples of each other.
    late = slice(3, None)
    for l in range(1, STEPS + 1):
        present = np.isin([*range(STEPS + 1), STEPS], (l, l + 1))
        assert np.all(error[l, present, late] < 1e-20), f"iterate {l}"
        assert np.all(error[l, ~present, late] > 1e-7), f"iterate {l}"
        assert np.all(found.beats_controls[l, present, late]), f"iterate {l}"
    # The input stays in the stream, and that is no news.
    assert np.all(error[0] < 1e-10)
    assert not np.any(found.beats["input"][0])
    # The next token can be told only after the gradient step.
    i = found.at("next")[0]
    assert np.all(error[i, -1, -1] < 0.5)
    assert np.all(error[i, :-1, -1] > 0.8)
    np.testing.assert_array_equal(
        found.beats_controls[i, :, -1], [False] * (STEPS + 1) + [True], err_msg=found.verdict()
    )
    said = found.verdict().splitlines()
    assert len(said) == len(found.targets) * len(PATHS)
    assert "iterate 2 from blocks.1.resid_post: relative error" in found.verdict()
    assert next(line for line in said if line.startswith("iterate 0 from embedded")).endswith("input")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 3])
def test_untrained_models_have_nothing_to_be_found(seeds):
    """False positives: at most 1% of all probes, over many keys."""
    flagged, total = 0, 0
    targets = {"next": next_token, "exact": preconditioned(LAM), **past_tokens([0, 1, 2])}
    inner = sampler(TASK, Standard(), targets)

    def sample(key, batch_size):
        batch = inner(key, batch_size)
        return batch._replace(tokens=batch.tokens.astype(jnp.float64))

    for trial in range(20):
        found = probe(
            untrained(100 + 10 * trial, seeds), sample, untrained=untrained(105 + 10 * trial, 3),
            activations=activations, paths=PATHS, sequences=256, batch_size=128, key=jax.random.key(trial),
        )  # fmt: skip
        flagged += int(found.beats_controls.sum())
        total += found.beats_controls.size
    assert flagged <= 0.01 * total, f"{flagged} of {total}"


def test_noise_has_nothing_to_be_found():
    """Activations that have nothing to do with the tokens; not even single controls may be beaten."""

    def noise(model, tokens):
        key = jax.random.fold_in(jax.random.key(7), jnp.round(model["number"]).astype(jnp.int32))
        return {"noise": jax.random.normal(key, (*tokens.shape[:2], 6), jnp.float64)}

    def numbered(first, count):
        return {"number": jnp.arange(first, first + count, dtype=jnp.float64)}

    flagged, total = dict.fromkeys(("untrained", "shuffled", "input", "all"), 0), 0
    for trial in range(50):
        found = probe(
            numbered(6 * trial, 3), noisy, untrained=numbered(6 * trial + 3, 3), activations=noise,
            sequences=200, batch_size=100, key=jax.random.key(trial),
        )  # fmt: skip
        for name in flagged:
            beaten = found.beats_controls if name == "all" else found.beats[name]
            flagged[name] += int(beaten.sum())
        total += found.beats_controls.size
    assert all(count <= 0.01 * total for count in flagged.values()), (flagged, total)


def test_targets():
    drawn = Dynamics.nonlinear(length=6).sample(jax.random.key(0), 5)
    s = np.asarray(drawn.observations, np.float64)
    past = {name: np.asarray(f(drawn)) for name, f in past_tokens([0, 2]).items()}
    assert list(past) == ["s[t]", "s[t-2]"]
    np.testing.assert_array_equal(past["s[t-2]"][:, 2:], drawn.observations[:, :4])
    assert not past["s[t-2]"][:, :2].any()
    np.testing.assert_array_equal(hidden_state()(drawn), drawn.states[:, :-1])
    np.testing.assert_array_equal(teacher_features(1)(drawn)[:, 1:], drawn.features[:, :5])
    np.testing.assert_array_equal(next_token(drawn), drawn.observations[:, 1:])
    inputs = {None: s[:, :-1], teacher_features(): np.asarray(drawn.features, np.float64)[:, :-1]}
    stack_2 = stacked(2)
    inputs[stack_2] = np.concatenate([s[:, :-1], np.concatenate([np.zeros((5, 1, 10)), s[:, :-2]], 1)], -1)
    for by, x in inputs.items():
        found = np.asarray(preconditioned(50.0, inputs=by)(drawn))
        for b in range(5):
            for t in range(6):
                gram = x[b, :t].T @ x[b, :t] + np.eye(x.shape[-1]) / 50.0
                np.testing.assert_allclose(found[b, t], np.linalg.inv(gram) @ x[b, t], rtol=1e-8, atol=1e-10)


def test_six_chebyshev_steps_come_near_the_exact_solution():
    drawn = TASK.sample(jax.random.key(2), 50)
    low, high = 1 / LAM, 1 / LAM + 3 * T
    solver = MesaOptimizer.chebyshev(low, high, steps=6, lam=LAM)
    near = solver.eta * preconditioned(solver)(drawn).astype(jnp.float64)
    exact = preconditioned(LAM)(drawn)
    context = autoregressive(drawn.observations)
    np.testing.assert_allclose(
        exact, exact_solution(np.asarray(context.queries), np.asarray(context.keys), LAM)
    )
    root = np.sqrt(high / low)
    rate = ((root - 1) / (root + 1)) ** 6
    start = solver.eta * context.queries.astype(jnp.float64) - exact
    assert np.sum((near - exact) ** 2) < (2 * rate / (1 + rate**2)) ** 2 * np.sum(start**2)


def test_outliers_are_left_out():
    drawn = TASK.sample(jax.random.key(2), 400)
    keep = without_outliers(preconditioned(1000.0))(drawn)
    norms = np.linalg.norm(preconditioned(1000.0)(drawn), axis=-1)
    np.testing.assert_array_equal(keep, (norms - norms.mean(0)) / norms.std(0) <= 2)
    assert 0.9 < keep.mean() < 1
    batch = sampler(TASK, Standard(), {"next": next_token}, keep=lambda drawn: keep)(jax.random.key(2), 400)
    assert batch.keep is keep


def test_course_over_training():
    arguments = dict(
        untrained=toys(2, 9),
        activations=toy,
        paths=("mixed",),
        sequences=64,
        batch_size=32,
        key=jax.random.key(0),
    )
    course = probe_checkpoints({100: toys(2), 0: toys(2, 9)}, noisy, **arguments)
    assert course.steps == (0, 100)
    assert course.relative.axes == ("seed", "step", "target", "path", "time")
    np.testing.assert_array_equal(
        course.probes[1].error.values, probe(toys(2), noisy, **arguments).error.values
    )
    # The first copy is the untrained models themselves.
    assert not course.probes[0].beats["untrained"].any()
    # A memory of the past that only the later copies have.
    untrained, trained = ({**toys(2), "memory": jnp.full(2, x, jnp.float64)} for x in (0.0, 1.0))
    arguments |= dict(untrained=untrained, activations=remembering, paths=("memory",))
    learned = probe_checkpoints({0: untrained, 100: trained}, noisy, **arguments)
    i = learned.probes[0].at("past")[0]
    beaten = [found.beats_controls[i, 0] for found in learned.probes]
    np.testing.assert_array_equal(beaten, [[False] * 4, [False, True, True, True]])
    with pytest.raises(ValueError, match="same seeds at every step"):
        probe_checkpoints({0: toys(2), 1: toys(3)}, noisy, **arguments)
    with pytest.raises(ValueError, match="keep_every"):
        probe_checkpoints({}, noisy, **arguments)


def test_same_key_same_numbers():
    arguments = dict(untrained=toys(2, 9), activations=toy, sequences=64, batch_size=32)
    one, two, other = (probe(toys(2), noisy, key=jax.random.key(k), **arguments) for k in (0, 0, 1))
    np.testing.assert_array_equal(one.error.values, two.error.values)
    assert np.any(one.error.values != other.error.values)


def test_several_at_once_are_each_alone():
    def late(key, batch_size):
        batch = noisy(key, batch_size)
        return batch._replace(targets={"now": batch.tokens}, keep=jnp.sum(batch.tokens, -1) < 1.5)

    arguments = dict(
        untrained=toys(2, 9), activations=toy, sequences=64, batch_size=32, key=jax.random.key(0)
    )
    samples = {"all": noisy, "late": late}
    for name, found in probe_each(toys(2), samples, **arguments).items():
        alone = probe(toys(2), samples[name], **arguments)
        assert found.targets == alone.targets
        for field in ("error", "untrained", "shuffled", "input"):
            np.testing.assert_array_equal(getattr(found, field).values, getattr(alone, field).values)
        for field in ("size", "in_sample", "in_sample_size"):
            np.testing.assert_array_equal(getattr(found, field), getattr(alone, field))
        for control in found.beats:
            np.testing.assert_array_equal(found.beats[control], alone.beats[control])
    with pytest.raises(ValueError, match="'other' draws other sequences than 'all'"):
        probe_each(
            toys(2), {"all": noisy, "other": lambda k, n: noisy(jax.random.fold_in(k, 1), n)}, **arguments
        )


def wide(key, batch_size):
    """Tokens of 6 numbers, of which `narrow` looks at 3."""
    batch = noisy(key, batch_size)
    return batch._replace(tokens=jnp.concatenate([batch.tokens, batch.tokens], -1))


def narrow(model, tokens):
    return {"narrow": tokens[..., :3]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"paths": ["scalar"]}, ValueError, "expected shape"),
        ({"sequences": 18}, ValueError, "5 wide.*Expected at least 20.*got 18"),
        ({"sample": wide, "activations": narrow, "sequences": 22}, ValueError, "a token is 6 wide.*least 24.*got 22"),
        ({"untrained": toys(1)}, ValueError, "at least 2 models"),
        ({"untrained": {"w": toys(2)["w"], "b": toys(2)["w"]}}, ValueError, "built differently"),
        ({"sample": lambda k, n: noisy(k, n)._replace(targets={})}, ValueError, "no targets"),
        (
            {"sample": lambda k, n: noisy(k, n)._replace(targets={"y": np.ones((n, 3, 1))})},
            ValueError,
            "target 'y': expected shape",
        ),
        ({"sample": lambda k, n: noisy(k, n)._replace(keep=np.zeros((n, 4), bool))}, ValueError, "keep: leaves 0"),
        ({"activations": lambda m, x: {"scalar": jnp.sum(x)}}, ValueError, "none of scalar has the shape"),
    ],
)  # fmt: skip
def test_bad_input(changes, error, message):
    arguments = dict(models=toys(2), sample=noisy, untrained=toys(2), activations=toy, sequences=64) | changes
    with pytest.raises(error, match=message):
        probe(arguments.pop("models"), arguments.pop("sample"), key=jax.random.key(0), **arguments)


def test_plots(tmp_path):
    mpl = pytest.importorskip("matplotlib")
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    arguments = dict(untrained=toys(2, 9), activations=toy, sequences=64, key=jax.random.key(0))
    found = probe(toys(2), noisy, **arguments)
    ax = found.plot("past")
    assert len(ax.lines) == 3
    assert found.plot_targets("sums").get_legend() is not None
    course = probe_checkpoints({0: toys(2), 5: toys(2)}, noisy, **arguments)
    assert len(course.plot("past").lines) == 2
    ax.figure.savefig(tmp_path / "probes.png")
    assert (tmp_path / "probes.png").stat().st_size > 5000
    plt.close("all")
    with pytest.raises(KeyError, match="nearest are: past"):
        found.plot("pasta")


@pytest.mark.alone
def test_cost():
    """All layers and times of the 7-layer model, 5 seeds and 5 untrained ones, 8192 sequences: within 60 s and 4 GB on
    two cores, which must have nothing else to do."""
    code = """
import resource, time, jax
from mesascope import preset
from mesascope.analysis.probes import probe, residual_stream
from mesascope.analysis.targets import next_token, sampler
from mesascope.training import Trainer
config = preset("softmax-7")
models = Trainer(config).start().models
began, used = time.monotonic(), time.process_time()
sample = sampler(config.task, config.tokens, {"next": next_token})
found = probe(models, sample, untrained=models, paths=residual_stream(7), sequences=8192, key=jax.random.key(0))
assert found.error.values.shape == (5, 1, 8, 50)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(time.monotonic() - began, time.process_time() - used, peak)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wall, processor, gigabytes = map(float, done.stdout.split())
    assert wall <= 60, f"{wall:.0f} s, {processor:.0f} s of processors"
    assert gigabytes < 4

"""Transformers written by hand against the algorithms they are, in float64, at every time and after every layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.tasks import Constructed, Dynamics, Stacked
from mesascope.theory.constructions import (
    copying,
    copying_then_mesa,
    copying_then_proposition_2,
    gradient_descent,
    induction_head,
    key_shift,
    proposition_1,
    proposition_2,
    stacked_proposition_1,
)
from mesascope.theory.solvers import (
    GradientDescent,
    GradientStep,
    KernelRegression,
    MesaOptimizer,
    NearestNeighbor,
    Ridge,
    StackedGradientSteps,
    autoregressive,
    chebyshev_coefficients,
)
from tests.theory import oracles

N, T = 4, 11
TOLERANCE = 1e-10
DOUBLE = jnp.float64
PHI = np.random.default_rng(3).standard_normal((N, N))
ETAS = (0.1, 0.05, 0.2)
STEPS, LAM, ETA = 5, 50.0, 0.1
ALPHAS, BETAS = chebyshev_coefficients(0.05, 2.0, STEPS)


@pytest.fixture(scope="module")
def s():
    sample = Dynamics.linear(state_dim=N, length=T, state_noise=0.1).sample(jax.random.key(0), 3)
    return sample.observations.astype(DOUBLE)


def streams(built, s, *slots):
    """Slots of the residual stream after every layer, and the predictions."""
    return jax.jit(lambda s: (*(built.stream(s, slot) for slot in slots), built(s)))(s[:, :-1])


def predict(built, s):
    return jax.jit(lambda s: built(s))(s)


def run(algorithm, s, **how):
    return np.asarray(jax.jit(lambda a, s: a(autoregressive(s, **how)))(algorithm, s))


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=TOLERANCE)


def product(layer, head, key_dim, *, read):
    """W_Kᵀ W_Q or P W_V of a head, acting on column vectors."""
    part = slice(head * key_dim, (head + 1) * key_dim)
    if read:
        return np.asarray(layer.keys[:, part] @ layer.queries[:, part].T)
    return np.asarray(layer.output[part].T @ layer.values[:, part].T)


def blocks(n, slots, at):
    """A matrix of n by n blocks, zero but for those named (row, column), counted from 1."""
    matrix = np.zeros((slots * n, slots * n))
    for (row, column), block in at.items():
        matrix[(row - 1) * n : row * n, (column - 1) * n : column * n] = block
    return matrix


def test_proposition_1(s):
    """Its matrices are the paper's; its tokens after the layer are those of a gradient step, in numpy and ours."""
    built = proposition_1(N, 0.1, PHI, dtype=DOUBLE)
    (layer,) = built.model.layers
    eye = np.eye(N)
    close(product(layer, 0, N, read=True), blocks(N, 3, {(3, 2): eye}))
    close(product(layer, 0, N, read=False), blocks(N, 3, {(1, 2): 0.1 * eye, (1, 3): -0.1 * PHI}))
    slots, predictions = streams(built, s, "prediction")
    close(slots[0], s[:, :-1] @ PHI.T)
    close(slots[1], oracles.at_every_step(oracles.gradient_descent([0.1], PHI), s))
    close(predictions, run(GradientStep(0.1, PHI), s))
    close(built.tokens(s[:, :-1])[..., N:], Constructed(slots=3)(s).tokens[..., N:])


@pytest.mark.parametrize(
    ("build", "algorithm"),
    [(stacked_proposition_1, StackedGradientSteps), (gradient_descent, GradientDescent)],
)
def test_stacks_of_gradient_steps(build, algorithm, s):
    """Biased and unbiased, from the same tokens, which are those of the released code."""
    built = build(N, ETAS, dtype=DOUBLE)
    close(built.tokens(s[:, :-1]), Constructed(slots=4)(s).tokens)
    slots, predictions = streams(built, s, "prediction")
    expected = jax.jit(lambda a, s: a.by_step(autoregressive(s)))(algorithm(ETAS), s)
    close(slots, expected)
    close(predictions, expected[-1])


def test_proposition_2(s):
    built = proposition_2(N, STEPS, ALPHAS, BETAS, LAM, ETA, dtype=DOUBLE)
    solution, previous, now, past, scratch, predictions = streams(
        built, s, "solution", "previous_solution", "input", "previous_input", "prediction"
    )
    expected = jax.jit(lambda a, s: a.preconditioned(autoregressive(s)))(
        MesaOptimizer(ALPHAS, BETAS, LAM, ETA), s
    )
    close(solution[:-1], expected)
    close(solution[-1], expected[-1])
    close(previous[1:-1], expected[:-1])
    for layer in range(STEPS + 2):
        close(now[layer], s[:, :-1])
        close(past[layer], np.pad(s[:, :-2], ((0, 0), (1, 0), (0, 0))))
    close(scratch[:-1], np.zeros_like(scratch[:-1]))
    close(predictions, oracles.at_every_step(oracles.richardson(ALPHAS, BETAS, LAM, ETA), s))


def test_the_matrices_of_proposition_2_are_those_of_its_docstring():
    built = proposition_2(N, STEPS, ALPHAS, BETAS, LAM, ETA, dtype=DOUBLE)
    eye = np.eye(N)
    *steps, last = built.model.layers
    for layer, alpha, beta in zip(steps, ALPHAS, BETAS, strict=True):
        close(product(layer, 0, N, read=True), blocks(N, 5, {(5, 2): eye}))
        close(product(layer, 0, N, read=False), blocks(N, 5, {(1, 5): -ETA * eye}))
        rows = {(1, 1): -eye, (2, 1): alpha * eye, (2, 2): (beta - alpha * ETA / LAM) * eye}
        rows |= {(2, 3): -beta * eye, (2, 4): alpha * eye, (3, 2): eye, (3, 3): -eye}
        width = 5 * N
        linear = np.asarray(layer.mlp_in[:, :width] @ layer.mlp_out[:width]).T
        close(linear, blocks(N, 5, rows))
        close(layer.mlp_in[:, width:], -layer.mlp_in[:, :width])
        close(layer.mlp_out[width:], -layer.mlp_out[:width])
    close(product(last, 0, N, read=True), blocks(N, 5, {(5, 2): eye}))
    close(product(last, 0, N, read=False), blocks(N, 5, {(1, 4): ETA * eye}))


def test_the_printed_matrices_do_not_work(s):
    """Blocks where the paper has them: what is written never reaches the slot of the solution."""
    built = proposition_2(N, 1, 1.0, 0.0, LAM, 1.0, dtype=DOUBLE)
    eye = np.eye(N)
    tokens = np.concatenate([s[:, :-1], s[:, :-1], np.pad(s[:, :-2], ((0, 0), (1, 0), (0, 0)))], -1)
    read, write = blocks(N, 3, {(1, 3): -eye}), blocks(N, 3, {(3, 1): -eye})
    context = np.cumsum(tokens[..., :, None] * tokens[..., None, :], 1)
    printed = np.einsum("ij,btjk,kl,btl->bti", write, context, read, tokens)
    assert np.abs(printed[..., :N]).max() == 0
    wanted = -np.einsum("btij,btj->bti", context[..., 2 * N :, 2 * N :], s[:, :-1])
    activations = built.model.trace(built.tokens(s[:, :-1]))[1]
    close(activations["blocks.0.resid_mid"][..., :N], wanted)


def test_with_enough_layers_the_forward_pass_is_least_squares(s):
    keys = np.asarray(autoregressive(s).keys)
    spectrum = np.linalg.eigvalsh(np.cumsum(keys[..., :, None] * keys[..., None, :], 1) + np.eye(N))
    steps, eta = 60, 2 / (spectrum.min() + spectrum.max())
    coefficients = chebyshev_coefficients(eta * spectrum.min(), eta * spectrum.max(), steps)
    built = proposition_2(N, steps, *coefficients, lam=1.0, eta=eta, dtype=DOUBLE)
    error = np.abs(predict(built, s[:, :-1]) - oracles.at_every_step(oracles.ridge(1.0), s)).max()
    assert error < 1e-8


def test_copying_is_exact_in_the_limit(s):
    """The error falls as exp(-sharpness), until it is below rounding."""
    k = 3
    z = np.asarray(Stacked(k=k)(s).tokens)
    spread = np.abs(s).max()
    errors = {}
    for sharpness in (5.0, 10.0, 20.0, 60.0):
        built = copying(N, k, sharpness, dtype=DOUBLE)
        errors[sharpness] = np.abs(predict(built, s[:, :-1]) - z).max()
        assert errors[sharpness] <= 2.1 * np.exp(-sharpness) * 2 * spread + 1e-14
    assert errors[5.0] > 0.1 * np.exp(-5.0)
    assert errors[60.0] < 1e-14


def test_copying_far_back():
    """Also farther than the fastest sine's period, and in long sequences."""
    s = jax.random.normal(jax.random.key(0), (1, 200, 2), DOUBLE)
    z = np.asarray(Stacked(k=16)(jnp.pad(s, ((0, 0), (0, 1), (0, 0)))).tokens)
    close(predict(copying(2, 16, 60.0, dtype=DOUBLE), s), z)


def test_copying_then_proposition_2(s):
    """Observations as tokens, at every layer Proposition 2 on the last k of them."""
    k = 2
    features = Stacked(k=k)(s).tokens
    optimizer = MesaOptimizer(ALPHAS, BETAS, LAM, ETA)
    built = copying_then_proposition_2(N, k, STEPS, ALPHAS, BETAS, LAM, ETA, sharpness=60.0, dtype=DOUBLE)
    solution, now, predictions = streams(built, s, "solution", "input", "prediction")[:3]
    expected = jax.jit(lambda a, s, z: a.preconditioned(autoregressive(s, features=z)))(
        optimizer, s, features
    )
    close(now[1], features)
    close(solution[1:-1], expected)
    close(predictions[-1][..., :N], run(optimizer, s, features=features))
    close(predict(built, s[:, :-1]), run(optimizer, s, features=features))


@pytest.mark.parametrize("k", [1, 2])
def test_copying_then_mesa_is_recursive_least_squares(k, s):
    features = np.pad(Stacked(k=k)(s).tokens, ((0, 0), (0, 1), (0, 0)))
    built = copying_then_mesa(N, k, LAM, sharpness=60.0, dtype=DOUBLE)
    expected = oracles.at_every_step(oracles.ridge(LAM), s, features=features)
    close(predict(built, s[:, :-1]), expected)


def test_key_shift_needs_no_copying(s):
    built = key_shift(N, LAM, dtype=DOUBLE)
    close(predict(built, s[:, :-1]), run(Ridge(LAM), s))


def test_induction_head(s):
    close(
        predict(induction_head(N, 3.0, sharpness=80.0, dtype=DOUBLE), s[:, :-1]),
        run(KernelRegression(3.0), s),
    )
    sharp = predict(induction_head(N, 3e5, sharpness=1e7, dtype=DOUBLE), s[:, :-1])
    close(sharp, run(NearestNeighbor(), s))


def test_single_precision_and_errors(s):
    """float32 unless asked otherwise; errors say what was expected."""
    built = proposition_2(N, STEPS, 1.0, 0.0, LAM, ETA)
    predictions = predict(built, s[:, :-1].astype(jnp.float32))
    assert predictions.dtype == jnp.float32
    exact = run(MesaOptimizer(np.ones(STEPS), np.zeros(STEPS), LAM, ETA), s)
    assert np.abs(np.asarray(predictions) - exact).max() < 1e-5
    with pytest.raises(ValueError, match="one number or 5"):
        proposition_2(N, STEPS, [1.0, 2.0], 0.0, LAM)
    with pytest.raises(ValueError, match=r"phi_0: expected shape \(4, 4\)"):
        proposition_1(N, 0.1, np.eye(3))
    with pytest.raises(ValueError, match="even number"):
        copying(N, 2, 1.0, codes=7)
    with pytest.raises(KeyError, match="There are: prediction, solution"):
        built.stream(s[:, :-1].astype(jnp.float32), "solutions")

"""Sequences are what they say they are: equations, distributions, and the authors' own bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from mesascope.tasks import MLP, Contracting, Dynamics
from mesascope.tasks.dynamics import haar

FAMILIES = ("linear", "partially_observed", "nonlinear", "contracting", "fixed_teacher")
VARIANTS = ("as_run", "as_written")


compiled = jax.jit(lambda task, key, batch: task.sample(key, batch), static_argnums=(0, 2))


def drawn(task, *, batch=512, seed=0):
    sample = compiled(task, jax.random.key(seed), batch)
    return type(sample)(*(None if a is None else np.asarray(a, np.float64) for a in sample))


def assert_mean(samples, expected, *, sigmas=5):
    """The mean of independent samples (axis 0) is the expected one, within its standard error."""
    error = np.abs(samples.mean(0) - expected)
    assert np.all(error <= sigmas * samples.std(0) / np.sqrt(len(samples)) + 1e-7)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, variant):
    """Shapes, the recursion step by step, and noise of the right size."""
    task = getattr(Dynamics, family)(variant)
    s = drawn(task)
    n, steps = task.state_dim, task.length + 1
    assert s.observations.shape == (512, steps, task.obs_dim)
    assert s.states.shape == s.features.shape == (512, steps, n)
    assert s.transition.shape == (512, n, n)
    assert np.isfinite(s.states).all()

    residual = s.states[:, 1:] - np.einsum("bij,btj->bti", s.transition, s.features[:, :-1])
    if task.clip is not None:
        assert np.abs(s.states).max() <= task.clip
        residual = residual[np.abs(s.states).max(-1).max(-1) < task.clip]
    assert_mean(residual.reshape(len(residual), -1) ** 2, task.state_noise**2, sigmas=6)
    if task.readout is not None:
        seen = np.einsum("bij,btj->bti", s.readout, s.states)
        noise = (s.observations - seen) ** 2
        assert_mean(noise.reshape(len(noise), -1), task.observation_noise**2, sigmas=6)
        assert_mean(s.readout.reshape(-1)[:, None] ** 2, task.readout.std**2)
    else:
        assert np.array_equal(s.observations, s.states)

    assert not np.array_equal(drawn(task, seed=1).states, s.states)


def test_same_key_same_bytes():
    task = Dynamics.linear()
    one, two = (compiled(task, jax.random.key(3), 16) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)
    assert all(a.dtype == jnp.float32 for a in one if a is not None)


def test_the_authors_own_sequences():
    """Half the squared length of the second token over their five evaluation seeds: the value they stored."""
    halves = []
    with jax.threefry_partitionable(False):
        for seed in (1, 11, 111, 1111, 11111):
            s = drawn(Dynamics.linear(), batch=256, seed=seed)
            halves.append(0.5 * (s.observations[:, 1] ** 2).sum() / 256)
    assert abs(np.mean(halves) - 1.67609) < 1e-5
    assert abs(np.std(halves) - 0.0271417) < 1e-6


@pytest.mark.parametrize("dim", [1, 2, 10, 60])
def test_matrices_are_made_orthogonal_as_by_lapack(dim):
    key = jax.random.key(3)
    ours = np.asarray(haar(key, dim, 50), np.float64)
    gram = np.swapaxes(ours, 1, 2) @ ours
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(dim), gram.shape), atol=2e-6)
    drawn = np.asarray(jax.random.normal(key, (50, dim, dim), jnp.float32), np.float64)
    q, r = np.linalg.qr(drawn)
    np.testing.assert_allclose(ours, q * np.sign(np.diagonal(r, axis1=1, axis2=2))[:, None], atol=1e-3)


def test_orthogonal_matrices_are_haar():
    r"""Orthogonal; entries of mean 0 and variance 1/n; tr W of mean 0 and variance 1; tr W² of mean 1."""
    w = drawn(Dynamics.linear(length=1), batch=4096).transition
    n = w.shape[-1]
    assert np.abs(w @ np.swapaxes(w, 1, 2) - np.eye(n)).max() < 1e-5
    assert_mean(w.reshape(len(w), -1), 0.0)
    assert_mean(w.reshape(len(w), -1) ** 2, 1 / n)
    trace = np.trace(w, axis1=1, axis2=2)
    assert_mean(trace[:, None], 0.0)
    assert_mean(trace[:, None] ** 2, 1.0)
    assert_mean(np.trace(w @ w, axis1=1, axis2=2)[:, None], 1.0)
    # Invariant under rotation: the same moments in another basis. QR without its sign fix fails here or above.
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((n, n)))
    assert_mean((q @ w)[:, 0, 0, None] ** 4, 3 / (n * (n + 2)))
    assert_mean(np.sign(np.linalg.det(w))[:, None], 0.0)


def test_orthogonal_dynamics_are_stationary_but_for_the_noise():
    s = drawn(Dynamics.linear(), batch=2048)
    energy = (s.states**2).sum(-1)
    growth = 10 * 0.01**2 * np.arange(51)
    assert_mean(energy - energy[:, :1], growth)
    assert_mean(energy[:, :1], 10 / 3)
    assert_mean((drawn(Dynamics.linear("as_written"), batch=2048).states[:, 0] ** 2).sum(-1)[:, None], 10.0)


def test_contracting_spectra():
    for pinned in (True, False):
        task = Dynamics(transition=Contracting(pin_largest=pinned), length=1)
        w = drawn(task, batch=256).transition
        # Eigenvalues of a strongly non-normal matrix are known only so well.
        eigenvalues = np.linalg.eigvals(w)
        conditions = np.array([np.linalg.cond(np.linalg.eig(a)[1]) for a in w])
        eigenvalues = eigenvalues[conditions < 100]
        assert len(eigenvalues) > 100
        assert np.abs(eigenvalues.imag).max() < 1e-2
        assert eigenvalues.real.min() > 0.3 - 1e-3
        assert eigenvalues.real.max() < 0.9 + 1e-3
        at_the_top = np.abs(eigenvalues.real.max(-1) - 0.9) < 1e-4
        assert at_the_top.all() if pinned else at_the_top.mean() < 0.1


def test_clipping_feeds_back_or_not():
    changes = dict(initial=Dynamics.linear().initial, length=30)
    back, after = (Dynamics.contracting(v, **changes) for v in VARIANTS)
    assert back.clip_feeds_back
    assert not after.clip_feeds_back
    for task in (back, after):
        assert (np.abs(drawn(task).states) == 2.0).any()


def test_one_teacher_for_all():
    task = Dynamics.fixed_teacher()
    one = drawn(task, seed=0)
    with jax.threefry_partitionable(False):
        two = drawn(task, seed=1)
    assert np.array_equal(one.transition, two.transition)
    assert (one.transition == one.transition[0]).all()
    assert not np.array_equal(one.states, two.states)


def test_nonlinear_features():
    """Against numpy, with the error function from scipy."""
    h = np.random.default_rng(0).standard_normal((7, 10))
    for gelu, unit in (("exact", True), ("tanh", True), ("exact", False)):
        mlp = MLP(gelu=gelu, unit_norm=unit)
        a, b = mlp.weights(10)
        x = h @ a
        cdf = 0.5 * (1 + erf(x / np.sqrt(2)))
        if gelu == "tanh":
            cdf = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        expected = (x * cdf) @ b
        expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True) if unit else expected
        got = np.asarray(mlp(jnp.asarray(h, jnp.float32)))
        assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
    states = drawn(Dynamics.nonlinear()).states[:, 1:]
    assert np.abs(np.linalg.norm(states, axis=-1) - 1).max() < 0.1


def test_without_unit_norm_the_nonlinear_system_explodes():
    """Why both presets have it, though the paper's text does not."""
    task = Dynamics.nonlinear("as_written", nonlinearity=MLP(unit_norm=False), length=20)
    assert np.abs(drawn(task, batch=8).states).max() > 1e15


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="variant: expected 'as_run' or 'as_written', got 'run'"):
        Dynamics.linear("run")
    with pytest.raises(ValueError, match="length"):
        Dynamics(length=0)
    with pytest.raises(ValueError, match="readout: nonlinear systems are fully observed"):
        Dynamics.partially_observed(nonlinearity=MLP())
    with pytest.raises(ValueError, match="clip"):
        Dynamics(clip=-1.0)

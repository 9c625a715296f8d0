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
        untouched = np.abs(s.states).max((1, 2)) != task.clip
        assert np.abs(s.states).max() <= (task.clip_only_above or task.clip)
        # float32 knows what a large state becomes only so well.
        residual = residual[untouched & (np.abs(s.states).max((1, 2)) < 2)]
    assert_mean(residual.reshape(len(residual), -1) ** 2, task.state_noise**2, sigmas=6)
    if task.readout is not None:
        seen = np.einsum("bij,btj->bti", s.readout, s.states)
        noise = (s.observations - seen) ** 2
        assert_mean(noise.reshape(len(noise), -1), task.observation_noise**2, sigmas=6)
        assert_mean(s.readout.reshape(-1)[:, None] ** 2, task.readout.std**2)
    else:
        assert np.array_equal(s.observations, s.states)

    assert not np.array_equal(drawn(task, seed=1).states, s.states)


NUMBERS = {
    ("linear", "as_run"): (-0.6357392, 0.4074149, 0.3265155),
    ("linear", "as_written"): (-0.8106009, 0.6523837, 1.0003764),
    ("partially_observed", "as_run"): (-0.5177162, 0.8312287, 1.2207436),
    ("partially_observed", "as_written"): (-0.7136190, 1.9279283, 7.4394925),
    ("nonlinear", "as_run"): (0.3706397, -0.0136479, 0.0984837),
    ("nonlinear", "as_written"): (0.3250953, 0.0037553, 0.1176344),
    ("fixed_teacher", "as_run"): (-0.3148977, -0.1380290, 0.3264464),
    ("fixed_teacher", "as_written"): (-0.7161959, 0.1068681, 1.0012895),
}
"""An entry of the first sequence, one of the last, and the mean of all squares, as they have always been drawn."""


@pytest.mark.parametrize(("family", "variant"), NUMBERS)
def test_what_a_key_draws_stays_what_it_was(family, variant):
    """Models and numbers that are published were made of it. (Of contracting systems every bit: `test_steady.py`.)"""
    s = compiled(getattr(Dynamics, family)(variant), jax.random.key(7), 64).observations
    found = s[0, 1, 0], s[63, 50, -1], np.mean(np.asarray(s, np.float64) ** 2)
    np.testing.assert_allclose(found, NUMBERS[family, variant], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_key_same_bytes(family):
    task = getattr(Dynamics, family)()
    one, two = (compiled(task, jax.random.key(3), 16) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)
    assert all(a.dtype == jnp.float32 for a in one if a is not None)


def test_the_authors_own_sequences():
    """Half the squared length of later tokens over their five evaluation seeds: the values they stored, and what
    another program found for tokens to which all the noise has been added."""
    halves = []
    with jax.threefry_partitionable(False):
        for seed in (1, 11, 111, 1111, 11111):
            s = drawn(Dynamics.linear(), batch=256, seed=seed)
            halves.append(0.5 * (s.observations**2).sum((0, 2)) / 256)
    assert abs(np.mean(halves, 0)[1] - 1.67609) < 1e-5
    assert abs(np.std(halves, 0)[1] - 0.0271417) < 1e-6
    for token, expected in (
        (3, 1.6759),
        (4, 1.67556),
        (6, 1.67583),
        (11, 1.67729),
        (21, 1.68078),
        (51, 1.69687),
    ):
        assert abs(np.mean(halves, 0)[token - 1] - expected) < 1e-5


def noise_of(key, batch, steps, dim):
    """One key for each sequence, of it one for each step, and one more that nothing is drawn from."""
    drawn = np.zeros((batch, steps, dim))
    for b, of_sequence in enumerate(jax.random.split(key, batch)):
        for t, of_step in enumerate(jax.random.split(of_sequence, steps + 1)[:steps]):
            drawn[b, t] = jax.random.normal(of_step, (dim,), jnp.float32)
    return 0.01 * drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_are_used_as_by_the_released_code(family):
    """What is drawn from which key (as its authors' code has it), and the recursion in numpy."""
    batch, steps, task = 3, 6, getattr(Dynamics, family)(length=6)
    n = task.state_dim
    with jax.threefry_partitionable(False):
        s = drawn(task, batch=batch, seed=5)
        count = {"nonlinear": 4, "contracting": 7}.get(family, 6)
        _, w_key, first_key, noise_key, *others = jax.random.split(jax.random.key(5), count)
        bound = 0.25 if family == "nonlinear" else 1.0
        first = jax.random.uniform(first_key, (batch, n), jnp.float32, -bound, bound)
        noise = noise_of(noise_key, batch, steps, n)
        if family == "contracting":
            basis = np.asarray(jax.random.normal(w_key, (batch, n, n), jnp.float32), np.float64)
            for w, m, key in zip(s.transition, basis, jax.random.split(others[2], batch), strict=True):
                drawn_key, shuffled_key = jax.random.split(key)
                rest = jax.random.uniform(drawn_key, (n - 1,), jnp.float32, 0.3, 0.9)
                spectrum = jax.random.permutation(shuffled_key, jnp.append(rest, jnp.float32(0.9)))
                error = np.abs(w @ m - m * np.asarray(spectrum, np.float64)).max()
                assert error < 1e-5 * np.linalg.norm(w) * np.linalg.norm(m)
        else:
            of_all = family == "fixed_teacher"
            key = jax.random.key(42) if of_all else w_key
            w = jax.random.orthogonal(key, n, () if of_all else (batch,), jnp.float32)
            assert np.abs(s.transition - np.asarray(w, np.float64)).max() < 1e-5
        if family == "partially_observed":
            obs_key, c_key = others
            c = 0.5 * np.asarray(jax.random.normal(c_key, (batch, 5, n), jnp.float32), np.float64)
            seen = 0.01 * np.asarray(jax.random.normal(obs_key, (batch, steps + 1, 5), jnp.float32))
        a, b = (np.asarray(jax.random.normal(jax.random.key(k), shape, jnp.float32), np.float64) * 1.1
                for k, shape in ((421, (10, 40)), (422, (40, 10))))  # fmt: skip
    assert np.array_equal(s.states[:, 0], first)
    for i in range(batch):
        for t in range(steps):
            h = s.states[i, t]
            if family == "nonlinear":
                x = h @ a
                h = (x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))) @ b
                h = h / np.linalg.norm(h)
            after = s.transition[i] @ h + noise[i, t]
            after = np.clip(after, -2, 2) if family == "contracting" else after
            assert np.abs(s.states[i, t + 1] - after).max() < 1e-6 * (1 + np.linalg.norm(s.transition[i]))
    if family == "partially_observed":
        assert np.abs(s.observations - np.einsum("bij,btj->bti", c, s.states) - seen).max() < 1e-5


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


@pytest.mark.parametrize("above", [None, 2.5])
@pytest.mark.parametrize("feeds_back", [True, False])
def test_clipping_feeds_back_or_not(feeds_back, above):
    """Rolled out in numpy, one sequence and one step at a time."""
    if feeds_back and above is not None:
        with pytest.raises(ValueError, match=r"clip_only_above: .*give clip, and clip_feeds_back=False"):
            Dynamics(clip=1.0, clip_only_above=above)
        return
    task = Dynamics(length=20, clip=1.0, clip_feeds_back=feeds_back, clip_only_above=above)
    s = drawn(task, batch=16)
    _, _, first_key, noise_key, *_ = jax.random.split(jax.random.key(0), 6)
    first = np.asarray(jax.random.normal(first_key, (16, 10), jnp.float32), np.float64)
    noise = noise_of(noise_key, 16, 20, 10)
    whole = []
    for i in range(16):
        states = [first[i]]
        for t in range(20):
            h = s.transition[i] @ states[-1] + noise[i, t]
            states.append(np.clip(h, -1, 1) if feeds_back else h)
        largest = np.abs(states).max()
        whole.append(above is None or largest > above)
        expected = np.clip(states, -1, 1) if whole[-1] else np.array(states)
        assert np.abs(s.states[i] - expected).max() < 1e-5
    assert any(whole)
    assert all(whole) == (above is None)


def test_contracting_as_written_clips_few():
    """The text: about 2% of sequences become very large, and these are clipped."""
    task = Dynamics.contracting("as_written")
    free = Dynamics.contracting("as_written", clip=None, clip_only_above=None)
    s, unclipped = drawn(task, batch=4096), drawn(free, batch=4096)
    large = np.abs(unclipped.states).max((1, 2)) > 40
    assert 0.01 < large.mean() < 0.035
    assert np.array_equal(s.states[~large], unclipped.states[~large])
    assert np.array_equal(s.states[large], np.clip(unclipped.states[large], -2, 2))


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
    with pytest.raises(ValueError, match=r"clip: expected more than 0, got -1\.0"):
        Dynamics(clip=-1.0)
    for name in ("state_noise", "observation_noise"):
        with pytest.raises(ValueError, match=rf"{name}: expected at least 0, got -1\.0"):
            Dynamics(**{name: -1.0})
        with pytest.raises(ValueError, match=f"{name}: expected a finite number, got nan"):
            Dynamics(**{name: float("nan")})
    with pytest.raises(ValueError, match=r"high: expected at least 0\.3, got 0\.1"):
        Contracting(high=0.1)

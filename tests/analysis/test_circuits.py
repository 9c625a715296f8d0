"""Weight products and scalars: planted ones are found, and models that have none are reported so."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.analysis import circuits
from mesascope.analysis.results import stack
from mesascope.models import Block, Linear, ModelConfig, Softmax, Transformer
from mesascope.tasks import Constructed, Dynamics
from mesascope.theory.constructions import gradient_descent, proposition_1, stacked_proposition_1
from mesascope.theory.solvers import GradientStep, autoregressive

N, SLOTS, LAYERS, HEADS, KEY = 3, 4, 6, 4, 12
TASK, TOKENS = Dynamics.linear(state_dim=N, length=9), Constructed(slots=4)


def blank(*, layers=LAYERS, heads=HEADS, key_dim=KEY, std=0.3, seeds=2, mixer=None, **more):
    """Untrained models in float64, with a seed axis."""
    block = Block(mixer=mixer or Linear(), heads=heads, key_dim=key_dim)
    config = ModelConfig(token_dim=SLOTS * N, output_dim=N, blocks=(block,) * layers, init_std=std, **more)
    models = jax.vmap(lambda key: Transformer(config, key=key))(jax.random.split(jax.random.key(0), seeds))
    return jax.tree.map(lambda a: a.astype(jnp.float64), models)


def planted(seeds=2, rotate=True):
    """Scalars, and models whose products they are although no matrix shows it: keys and values are rotated."""
    rng = np.random.default_rng(0)
    read, write = rng.standard_normal((2, seeds, LAYERS, HEADS, SLOTS, SLOTS))
    models = blank(seeds=seeds)
    for i in range(LAYERS):
        new = {name: [] for name in circuits.NAMES}
        for s in range(seeds):
            parts = {name: [] for name in circuits.NAMES}
            for h in range(HEADS):
                turn, other = (np.linalg.qr(rng.standard_normal((KEY, KEY)))[0] for _ in range(2))
                skew = rng.standard_normal((KEY, KEY)) + 4 * np.eye(KEY)
                parts["keys"].append(turn @ np.linalg.inv(skew).T)
                parts["queries"].append(np.kron(read[s, i, h], np.eye(N)).T @ turn @ skew)
                parts["values"].append(np.kron(write[s, i, h], np.eye(N)).T @ other)
                parts["output"].append(other.T)
            for name, matrices in parts.items():
                new[name].append(np.concatenate(matrices, 0 if name == "output" else 1))
        for name, matrices in new.items():
            models = eqx.tree_at(
                lambda m, i=i, name=name: getattr(m.layers[i], name), models, jnp.asarray(np.stack(matrices))
            )
    return models, read, write


def examples(batch=8, seed=1):
    found = TOKENS(TASK.sample(jax.random.key(seed), batch).observations.astype(jnp.float64))
    return found


def test_planted_scalars():
    """CompressedAlg-6 finds all 768, although the matrices are mixed; and the model rebuilt from them is the model."""
    models, read, write = planted()
    scalars = circuits.read_off(circuits.products_of(models), width=N)
    assert scalars.count == 768
    np.testing.assert_allclose(scalars.read, read, atol=1e-11)
    np.testing.assert_allclose(scalars.write, write, atol=1e-11)
    np.testing.assert_allclose(scalars.read_share, 1, atol=1e-11)
    for part in scalars.share:
        np.testing.assert_allclose(part.mean, 1, atol=1e-11)
    assert scalars.structured.all()
    assert len(scalars.plot().images) == len(circuits.products_of(models).plot().images) == 2 * LAYERS * HEADS
    # A sequence short enough for six layers of cubic polynomials with coefficients of order one.
    tokens = 0.1 * examples().tokens[:, :2]
    rebuilt = circuits.compress(models, width=N)
    ours, theirs = (jax.jit(jax.vmap(lambda m: m(tokens)))(m) for m in (models, rebuilt))
    np.testing.assert_allclose(theirs, ours, rtol=1e-9, atol=1e-10 * float(jnp.max(jnp.abs(ours))))


def test_products_against_numpy():
    """Each head by itself, from arrays by name, with and without a seed axis."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 5, 6))
    v, o = rng.standard_normal((7, 4)), rng.standard_normal((4, 8))
    named = dict(queries=q, keys=k, values=v, output=o)
    found = circuits.products(named, heads=2)
    for h in range(2):
        key, value = slice(3 * h, 3 * h + 3), slice(2 * h, 2 * h + 2)
        np.testing.assert_allclose(found.read[0, 0, h], k[:, key] @ q[:, key].T, atol=1e-12)
        np.testing.assert_allclose(found.write[0, 0, h], o[value].T @ v[:, value].T, atol=1e-12)
    again = circuits.products([{n: np.stack([a, a]) for n, a in named.items()}], heads=2)
    np.testing.assert_array_equal(again.read[1], found.read[0])


def test_theory_is_read_back():
    """The constructions' own scalars: η at (prediction, input), and the second head of the biased stack."""
    built = stacked_proposition_1(N, [0.1, 0.3], dtype=jnp.float64)
    found = circuits.read_off(circuits.products_of(stack([built.model])), width=N)
    expected = np.zeros((2, 2, SLOTS, SLOTS))
    expected[:, 0, 0, 1], expected[:, 1, 1, 1] = [0.1, 0.3], [-0.1, -0.3]
    np.testing.assert_allclose(found.write[0], expected, atol=1e-12)
    assert found.read[0, 0, 0, 3, 2] == found.read[0, 1, 1, 3, 3] == 1
    built = gradient_descent(N, [0.1], dtype=jnp.float64)
    found = circuits.read_off(circuits.products_of(stack([built.model])), width=N)
    assert found.read[0, 0, 0, 3, 1] == 1
    assert found.share[0].mean == 1


def test_structure_is_not_found_where_there_is_none():
    """Untrained: of 9 entries of a block the scalar keeps what one of 9 random directions would."""
    models = blank(seeds=40, layers=1, heads=2)
    found = circuits.read_off(circuits.products_of(models), width=N)
    assert abs(found.read_share.mean() - 1 / N**2) < 4 * found.read_share.std() / np.sqrt(80)
    rest = circuits.read_off(circuits.products_of(models), width=N, blocks=circuits.PROPOSITION_1)
    assert rest.read_share.mean() < 0.05
    objective = circuits.mesa_objective(
        circuits.read_off(circuits.products_of(models), width=N, blocks=circuits.ONE_LAYER)
    )
    assert objective.share.mean() < 0.5


def test_interpolation_averages_products():
    """Halfway is the model with averaged products; at the scalars' own models it costs nothing."""
    models, _, _ = planted()
    small = jax.tree.map(lambda a: 0.5 * a, models)
    scalars = circuits.read_off(circuits.products_of(small), width=N)
    noisy = jax.tree.map(lambda a: a + 0.05 * jax.random.normal(jax.random.key(7), a.shape, a.dtype), small)
    held = examples()
    held = held._replace(tokens=0.3 * held.tokens, targets=0.3 * held.targets)
    found = circuits.interpolate({0: noisy, 100: small}, scalars, held)
    assert found.trained.shape == found.halfway.shape == (2, 8, 2)
    np.testing.assert_allclose(found.halfway[..., 1], found.trained[..., 1], rtol=1e-8)
    np.testing.assert_allclose(found.compressed, found.trained[..., 1], rtol=1e-8)
    assert np.all(found.halfway[..., 0] != found.trained[..., 0])
    # By hand, from the definition, for one model and sequence.
    both = circuits.products_of(noisy), scalars.products()
    mean = [np.asarray(a + b)[0] / 2 for a, b in zip(*both, strict=True)]
    e = np.asarray(held.tokens[0])
    for read, write in zip(*mean, strict=True):
        scores = np.tril(np.einsum("ta,hba,ib->hti", e, read, e))
        e = e + np.einsum("hti,hab,ib->ta", scores, write, e)
    error = 0.5 * np.mean(np.sum((e[:, :N] - np.asarray(held.targets[0])) ** 2, -1))
    np.testing.assert_allclose(found.halfway[0, 0, 0], error, rtol=1e-9)
    assert found.plot() is not None


def one_layer(weights):
    """Two heads with these scalars: reads [head, key, query], writes [head, value]."""
    m, p = weights
    models = blank(layers=1, heads=2, seeds=1, masked=2 * N)
    read, write = np.zeros((2, 1, 1, 2, SLOTS, SLOTS))
    read[0, 0, :, 2:, 2:], write[0, 0, :, 0, 2:] = m, p
    return circuits.from_products(
        models, circuits.Products(*(jnp.asarray(np.kron(a, np.eye(N))) for a in (read, write)))
    )


def test_twelve_scalars_are_an_objective():
    """What the objective's gradient step predicts is what the layer predicts; its gradient is that of jax."""
    rng = np.random.default_rng(3)
    models = one_layer((rng.standard_normal((2, 2, 2)), rng.standard_normal((2, 2))))
    scalars = circuits.read_off(circuits.products_of(models), width=N, blocks=circuits.ONE_LAYER)
    assert scalars.count == 12
    objective = circuits.mesa_objective(scalars)
    s = TASK.sample(jax.random.key(2), 4).observations.astype(jnp.float64)
    np.testing.assert_allclose(
        objective.predictions(s), jax.jit(jax.vmap(lambda m: m(TOKENS(s).tokens)))(models), atol=1e-10
    )
    g, t = objective.weights[0], 6
    now = s[0, :-1]
    both = np.stack([now, np.concatenate([np.zeros((1, N)), now[:-1]])])

    def loss(phi, a):
        return sum(
            g[a, c, b] / 2 * jnp.sum((both[c, : t + 1] - both[b, : t + 1] @ phi.T) ** 2)
            for c in range(2)
            for b in range(2)
        )

    steps = [
        -jax.jit(jax.grad(lambda phi, a=a: loss(phi, a)))(jnp.zeros((N, N))) @ both[a, t] for a in range(2)
    ]
    np.testing.assert_allclose(steps[0] + steps[1], objective.predictions(s)[0, 0, t], atol=1e-10)


def test_proposition_1_is_the_plain_objective():
    models = one_layer((np.array([[[0, 0], [1, 0]], [[0, 0], [0, 0]]]), np.array([[0.2, 0], [0, 0]])))
    objective = circuits.mesa_objective(circuits.read_off(circuits.products_of(models), width=N))
    np.testing.assert_allclose(objective.eta, 0.2)
    np.testing.assert_allclose(objective.share, 1)
    assert objective.descends
    assert objective.present.reshape(-1).tolist() == [False, True] + [False] * 6
    np.testing.assert_allclose(objective.phi_0, 0)
    s = TASK.sample(jax.random.key(2), 4).observations.astype(jnp.float64)
    np.testing.assert_allclose(objective.predictions(s)[0], GradientStep(0.2)(autoregressive(s)), atol=1e-12)
    # From Φ_0 = φI: Proposition 1's tokens bring Φ_0 s_t along, the rest is in the weights.
    built = proposition_1(N, 0.2, 0.5 * np.eye(N), dtype=jnp.float64)
    found = circuits.mesa_objective(
        circuits.read_off(circuits.products_of(stack([built.model])), width=N), now=1, previous=2
    )
    np.testing.assert_allclose(found.phi_0, 0.5)
    np.testing.assert_allclose(
        found.predictions(s)[0] + 0.5 * s[:, :-1],
        GradientStep(0.2, 0.5 * np.eye(N))(autoregressive(s)),
        atol=1e-12,
    )
    assert objective.plot() is not None


def test_bad_input():
    models = blank(layers=1, heads=2)
    found = circuits.products_of(models)
    with pytest.raises(ValueError, match="slots of 5"):
        circuits.read_off(found, width=5)
    with pytest.raises(ValueError, match="4 slots of 3, got blocks for 2"):
        circuits.read_off(found, width=N, blocks=circuits.all_blocks(2))
    with pytest.raises(KeyError, match="no output"):
        circuits.products({"queries": 1, "keys": 1, "values": 1}, heads=1)
    with pytest.raises(ValueError, match="5 heads divide"):
        circuits.products({n: getattr(models.layers[0], n) for n in circuits.NAMES}, heads=5)
    with pytest.raises(ValueError, match="same seeds"):
        circuits.from_products(blank(layers=1, heads=2, seeds=3), found)
    with pytest.raises(ValueError, match="same seeds"):
        circuits.between(found, circuits.products_of(blank(layers=1, heads=2, seeds=3)))
    with pytest.raises(ValueError, match="not linear attention"):
        circuits.from_products(blank(layers=1, heads=2, mixer=Softmax()), found)
    with pytest.raises(ValueError, match="one gradient step"):
        circuits.mesa_objective(circuits.read_off(circuits.products_of(blank()), width=N))
    with pytest.raises(ValueError, match="keep_every"):
        circuits.interpolate({}, circuits.read_off(found, width=N), examples())
    with pytest.raises(ValueError, match="counted from 0"):
        circuits.blocks_at(3, [(3, 0)], [])

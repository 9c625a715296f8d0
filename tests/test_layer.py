"""MesaLayer: what a user relies on when it takes the place of attention."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope import GramState, MesaState
from mesascope.layer import NORM_FLOOR, MesaLayer
from tests.helpers import assert_close, rls

TIME, MODEL = 9, 8
VARIANTS = {
    "plain": {},
    "bias": {"use_bias": True, "normalize": False},
    "gates": {"decay_init": 0.9, "beta_init": 0.8, "method": "auto"},
    "channels": {"per_channel": True, "value_dim": 3, "beta_init": 0.8, "lam_init": 5.0},
    "constant": {"regularizer": "constant"},
    "constant_decay": {"regularizer": "constant", "decay_init": 0.9, "method": "auto"},
}

# One compilation instead of dozens of small ones, and proof that a layer is a plain jit argument.
call = jax.jit(lambda layer, x, **options: layer(x, **options), static_argnames="return_state")


def make(**options) -> MesaLayer:
    # The recursive method compiles fastest; the default one is tested where the state passes between methods.
    defaults = {"heads": 2, "method": "recursive", "dtype": jnp.float64, "key": jax.random.key(0)}
    return MesaLayer(MODEL, **defaults | options)


def awake(layer: MesaLayer) -> MesaLayer:
    """The layer with gates that look at their input, and a different λ everywhere, as after training."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda a: a + jnp.asarray(0.3 * rng.standard_normal(a.shape), a.dtype), layer)


def tokens(*shape: int, dtype=jnp.float64) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (*(shape or (TIME,)), MODEL), dtype)


def regression(state: MesaState | GramState) -> tuple[jax.Array, ...]:
    """What a state means: its square root is one of many for the same covariance."""
    return (state.covariance, state.weights) if isinstance(state, MesaState) else tuple(state)


@pytest.mark.parametrize("name", VARIANTS)
def test_prefill_then_steps_equals_whole(name):
    @jax.jit
    def ways(layer, x):
        _, state = prefill = layer(x[:4], return_state=True)
        step = lambda state, token: layer.step(state, token)  # noqa: E731
        decoded = jax.lax.scan(step, state, x[4:])
        continued = layer(x[4:], state=state, return_state=True)
        from_start = jax.lax.scan(step, layer.init_state(), x)
        return layer(x, return_state=True), prefill, decoded, continued, from_start

    x = tokens()
    whole, prefill, decoded, continued, from_start = ways(awake(make(**VARIANTS[name])), x)
    assert whole[0].shape == x.shape
    assert whole[0].dtype == x.dtype
    for state, outputs in (decoded, continued[::-1]):
        assert_close(jnp.concatenate([prefill[0], outputs]), whole[0], scale=5, name="outputs")
        assert_close(regression(state), regression(whole[1]), scale=5, name="state")
    assert_close(from_start[1], whole[0], scale=5, name="outputs from the start")
    assert_close(regression(from_start[0]), regression(whole[1]), scale=5, name="state from the start")


@pytest.mark.parametrize(("regularizer", "normalize"), [("decayed", True), ("constant", False)])
def test_it_is_the_least_squares_its_docstring_says(regularizer, normalize):
    options = {"decay_init": 0.9, "beta_init": 0.8, "per_channel": True, "value_dim": 3}
    layer = awake(make(regularizer=regularizer, normalize=normalize, method="reference", **options))
    x = np.asarray(tokens())
    weights = [np.asarray(p.weight) for p in (layer.query_proj, layer.key_proj, layer.value_proj)]
    q, k, v = ((x @ w.T).reshape(TIME, 2, -1).swapaxes(0, 1) for w in weights)
    if normalize:
        q, k = (a / np.sqrt(np.sum(a**2, -1, keepdims=True) + NORM_FLOOR) for a in (q, k))
    decay, beta = ((x @ np.asarray(g.weight).T + g.bias[None]).T for g in (layer.decay_gate, layer.beta_gate))
    arguments = {"queries": q, "keys": k, "values": v, "lam": np.log1p(np.exp(layer.raw_lam))}
    arguments |= {"log_decay": -np.log1p(np.exp(decay)), "beta": 1 / (1 + np.exp(-beta))}
    heads = rls(arguments, constant=regularizer == "constant")
    expected = heads.swapaxes(0, 1).reshape(TIME, 6) @ np.asarray(layer.output_proj.weight).T
    assert_close(call(layer, jnp.asarray(x)), expected)


def test_starts_at_the_constants_asked_for():
    layer = make(lam_init=2.5, decay_init=0.99, beta_init=0.95, per_channel=True)
    assert_close(layer.lam, np.full((2, 4), 2.5))
    pairs = layer._project(tokens())
    assert_close(np.exp(pairs.log_decay), np.full((TIME, 2), 0.99))
    assert_close(pairs.beta, np.full((TIME, 2), 0.95))
    for lam in (1e-3, 1e4):
        assert_close(make(lam_init=lam).lam, np.full((2, 1), lam))


@pytest.mark.parametrize("raw", [-200.0, 200.0])
def test_lam_stays_positive_however_far_an_optimizer_goes(raw):
    layer = make(dtype=jnp.float32, method="auto")
    layer = eqx.tree_at(lambda m: m.raw_lam, layer, jnp.full((2, 1), raw, jnp.float32))
    assert (layer.lam > 0).all()
    x = tokens(dtype=jnp.float32)
    loss, grads = jax.jit(jax.value_and_grad(lambda m: jnp.sum(m(x) ** 2)))(layer)
    for leaf in (loss, *jax.tree.leaves(grads)):
        assert jnp.isfinite(leaf).all()


@pytest.mark.parametrize("regularizer", ["decayed", "constant"])
def test_every_leaf_is_floating_and_learns(regularizer):
    options = {"decay_init": 0.9, "beta_init": 0.8, "use_bias": True, "per_channel": True}
    method = "recursive" if regularizer == "decayed" else "reference"
    layer = make(regularizer=regularizer, method=method, dtype=jnp.float32, **options)
    leaves = jax.tree.leaves(layer)
    # Four projections and two gates, each with a bias, and λ.
    assert len(leaves) == 13
    assert all(isinstance(a, jax.Array) and a.dtype == jnp.float32 for a in leaves)
    x = tokens(dtype=jnp.float32)
    # Plain jax.grad: everything else in the layer is static.
    grads = jax.jit(jax.grad(lambda m: jnp.sum((m(x) - 1.0) ** 2)))(layer)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert jnp.isfinite(grad).all(), path
        assert (jnp.abs(grad) > 1e-7).mean() > 0.9, path


def test_gradients_agree_between_methods():
    layers = [awake(make(method=m, decay_init=0.9, beta_init=0.8)) for m in ("auto", "recursive")]
    gradient = jax.jit(jax.grad(lambda m: jnp.sum((m(tokens()) - 1.0) ** 2)))
    one, other = (jax.tree.leaves(gradient(layer)) for layer in layers)
    assert_close(one, other, scale=10)


def test_segments_do_not_see_each_other():
    layer, x = awake(make(decay_init=0.9, beta_init=0.8)), tokens()
    ids = jnp.array([4] * 3 + [0] * (TIME - 3))
    packed, state = call(layer, x, segment_ids=ids, return_state=True)
    second, alone = call(layer, x[3:], return_state=True)
    assert_close(packed, jnp.concatenate([call(layer, x[:3]), second]))
    assert_close(regression(state), regression(alone))
    assert jnp.abs(packed[3:] - call(layer, x)[3:]).max() > 1e-2


def test_causal():
    layer, x = awake(make(decay_init=0.9, beta_init=0.8)), tokens()
    changed = call(layer, x.at[5].add(1.0)) - call(layer, x)
    assert jnp.abs(changed[:5]).max() < 1e-12
    assert (jnp.abs(changed[5:]).max(-1) > 1e-3).all()


def test_batches_are_vmapped_and_traced_once():
    layer, batch = make(decay_init=0.9, beta_init=0.8), tokens(3, TIME)
    traces = []

    @jax.jit
    def run(layer, batch):
        traces.append(None)
        out, states = jax.vmap(lambda x: layer(x, return_state=True))(batch)
        return out, jax.vmap(layer.step)(states, batch[:, 0])[1]

    out, stepped = run(layer, batch)
    run(awake(layer), batch)
    assert len(traces) == 1
    alone, state = call(layer, batch[1], return_state=True)
    assert_close(out[1], alone)
    assert_close(stepped[1], layer.step(state, batch[1, 0])[1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bfloat16(dtype):
    """The input decides the precision of projections and output, whatever that of the parameters."""
    layer = make(decay_init=0.99, beta_init=0.9, dtype=dtype)
    assert {a.dtype for a in jax.tree.leaves(layer)} == {jnp.dtype(dtype)}
    assert layer.lam.dtype == jnp.float32
    x = tokens(dtype=jnp.bfloat16)
    out, state = call(layer, x, return_state=True)
    assert out.dtype == jnp.bfloat16
    assert {a.dtype for a in state} == {jnp.dtype(jnp.float32)}
    full = jax.tree.map(lambda a: a.astype(jnp.float32), layer)
    assert_close(out, call(full, x.astype(jnp.float32)))
    state, last = jax.jit(lambda m, x: m.step(m(x[:-1], return_state=True)[1], x[-1]))(layer, x)
    assert last.dtype == jnp.bfloat16
    assert_close(last, out[-1])


def test_bfloat16_inputs_do_not_round_the_gates():
    pairs = make(decay_init=0.999, beta_init=0.99, dtype=jnp.float32)._project(tokens(dtype=jnp.bfloat16))
    assert pairs.log_decay.dtype == pairs.beta.dtype == jnp.float32
    assert_close(pairs.log_decay, np.full((TIME, 2), np.log(0.999)))
    assert_close(pairs.beta, np.full((TIME, 2), 0.99))


def test_default_parameters_are_float32_and_same_key_gives_same_bytes():
    one, same, other = (MesaLayer(MODEL, heads=2, key=jax.random.key(seed)) for seed in (3, 3, 4))
    assert {a.dtype for a in jax.tree.leaves(one)} == {jnp.dtype(jnp.float32)}
    assert eqx.tree_equal(one, same)
    assert not eqx.tree_equal(one, other)
    kernels = [one.query_proj.weight, one.key_proj.weight, one.value_proj.weight, one.output_proj.weight]
    assert len({a.tobytes() for a in map(np.asarray, kernels)}) == 4


def test_key_dim_frees_heads_from_dividing():
    layer = make(heads=3, key_dim=5, value_dim=2)
    assert call(layer, tokens()).shape == (TIME, MODEL)
    assert layer.init_state().weights.shape == (3, 2, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads: expected a divisor of model_dim = 8"),
        ({"heads": 0}, "heads: "),
        ({"heads": 0, "key_dim": 4}, "heads: "),
        ({"key_dim": 0}, "key_dim: "),
        ({"value_dim": 0}, "value_dim: "),
        ({"lam_init": 0.0}, "lam_init: "),
        ({"lam_init": -1.0}, "lam_init: "),
        ({"lam_init": float("inf")}, "lam_init: "),
        ({"lam_init": float("nan")}, "lam_init: "),
        ({"decay_init": 1.0}, "decay_init: .* pass None"),
        ({"beta_init": 0.0}, "beta_init: "),
        ({"method": "fast"}, "method: "),
        ({"regularizer": "constant", "decay_init": 0.9, "method": "chunked"}, "method: .*'auto'"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make(**options)


def test_errors_on_inputs_say_what_to_do():
    layer = make()
    with pytest.raises(ValueError, match=r"^x: .*model = 8.*vmap"):
        layer(jnp.zeros((TIME, MODEL + 1)))
    with pytest.raises(ValueError, match=r"^x: .*model = 8.*vmap"):
        layer.step(layer.init_state(), jnp.zeros(MODEL + 1))
    # With jaxtyping's checker on, it is the one that speaks; both name the axes.
    with pytest.raises((ValueError, TypeError), match=r"time,? model"):
        layer(tokens(2, TIME))
    with pytest.raises(TypeError, match=r"time,? model"):
        layer(jnp.zeros((TIME, MODEL), int))

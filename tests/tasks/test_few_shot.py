import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesascope.tasks import FewShot
from mesascope.tasks.few_shot import EOS, PREFIX, X, Y

KEY = jax.random.key(0)
EOS_VECTOR = jnp.full((10,), 7.0, jnp.float32)
PREFIX_VECTORS = jnp.arange(200, dtype=jnp.float32).reshape(20, 10)


def prompt_of(task, batch=3):
    regression = task.sample(KEY, batch)
    vectors = dict(eos=EOS_VECTOR if task.eos else None, prefix=PREFIX_VECTORS if task.prefix else None)
    return regression, task.prompt(regression, **vectors)


@pytest.mark.parametrize(
    ("task", "pairs"),
    [
        (FewShot.preset(), 112),
        (FewShot.preset(eos=True), 75),
        (FewShot.preset(prefix=20), 102),
        (FewShot.preset(eos=True, prefix=20), 68),
        (FewShot.preset(switch=80), 72),
        (FewShot.preset(eos=True, prefix=20, switch=80), 42),
    ],
    ids=["pairs", "eos", "prefix", "eos and prefix", "two tasks", "two tasks, eos and prefix"],
)
def test_prompts_token_by_token(task, pairs):
    """Against a plain loop that writes the sequence down."""
    regression, prompt = prompt_of(task)
    x, y = np.asarray(regression.inputs), np.asarray(regression.labels)
    assert task.pairs == pairs
    expected, predicted = [], []
    for which, share in enumerate(
        [task.length] if task.switch is None else [task.switch, task.length - task.switch]
    ):
        tokens = [np.broadcast_to(p, (3, 10)) for p in np.asarray(PREFIX_VECTORS)[: task.prefix]]
        asked = [None] * len(tokens)
        for i in range(x.shape[2]):
            tokens += [x[:, which, i], y[:, which, i]]
            asked += [y[:, which, i], None]
            if task.eos:
                tokens.append(np.broadcast_to(EOS_VECTOR, (3, 10)))
                asked.append(None)
        expected += tokens[:share]
        predicted += asked[:share]
    assert np.array_equal(prompt.tokens, np.stack(expected, 1))
    assert np.array_equal(prompt.predicts, [p is not None for p in predicted])
    for t, label in enumerate(predicted):
        assert np.array_equal(prompt.targets[:, t], np.zeros((3, 10)) if label is None else label)
    # What is asked for is what comes next.
    for t in np.flatnonzero(prompt.predicts[:-1]):
        assert task.layout.part[t + 1] == Y or task.layout.task[t + 1] != task.layout.task[t]


def test_layout_names_every_position():
    layout = FewShot(eos=True, prefix=2, length=12, switch=7).layout
    assert layout.part.tolist() == [PREFIX, PREFIX, X, Y, EOS, X, Y, PREFIX, PREFIX, X, Y, EOS]
    assert layout.number.tolist() == [0, 1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0]
    assert layout.task.tolist() == [0] * 7 + [1] * 5


def test_labels():
    """y = Wx + noise, W orthogonal and another one for the second task; noise shared as the authors had it."""
    regression, _ = prompt_of(FewShot.preset(switch=80), batch=64)
    x, y, w = (np.asarray(a, np.float64) for a in regression)
    noise = y - np.einsum("bkij,bkpj->bkpi", w, x)
    assert abs(noise.std() - 0.01) < 1e-3
    assert np.abs(noise - noise[:1]).max() < 1e-6
    assert np.abs(x).max() <= 1
    assert np.abs(w @ np.swapaxes(w, -1, -2) - np.eye(10)).max() < 1e-5
    assert np.abs(w[:, 0] - w[:, 1]).max() > 0.5
    written, _ = prompt_of(FewShot.preset("as_written"), batch=64)
    x, y, w = (np.asarray(a, np.float64) for a in written)
    assert np.abs(y - np.einsum("bkij,bkpj->bkpi", w, x)).max() < 1e-5
    assert abs(x.std() - 1) < 0.02


def test_keys_are_used_as_by_the_released_code():
    """Key in two, matrices and inputs; the noise of labels from the key itself, one for the whole batch."""
    task = FewShot.preset()
    with jax.threefry_partitionable(False):
        regression = task.sample(KEY, 3)
        w_key, x_key = jax.random.split(KEY)
        w = np.asarray(jax.random.orthogonal(w_key, 10, (3,), jnp.float32), np.float64)
        x = np.asarray(jax.random.uniform(x_key, (3, 112, 10), jnp.float32, -1, 1))
        noise = 0.01 * np.asarray(jax.random.normal(KEY, (112, 10), jnp.float32), np.float64)
    inputs, labels, transition = (np.asarray(a)[:, 0] for a in regression)
    assert np.array_equal(inputs, x)
    assert np.abs(transition - w).max() < 1e-5
    for b in range(3):
        for i in range(112):
            assert np.abs(labels[b, i] - (w[b] @ x[b, i] + noise[i])).max() < 1e-5


@pytest.mark.parametrize("changes", [{}, dict(switch=80), dict(variant="as_written")])
def test_same_key_same_bytes(changes):
    task = FewShot.preset(**changes)
    one, two, other = (task.sample(jax.random.key(seed), 4) for seed in (3, 3, 4))
    for a, b, c in zip(one, two, other, strict=True):
        assert a.dtype == jnp.float32
        assert np.array_equal(a, b)
        assert not np.array_equal(a, c)


def test_gradients_reach_what_is_learned():
    task = FewShot.preset(eos=True, prefix=20)
    regression = task.sample(KEY, 2)

    def total(eos, prefix):
        return jnp.sum(task.prompt(regression, eos=eos, prefix=prefix).tokens)

    eos_bar, prefix_bar = jax.grad(total, (0, 1))(EOS_VECTOR, PREFIX_VECTORS)
    assert np.array_equal(eos_bar, np.full(10, 2 * (task.layout.part == EOS).sum()))
    assert np.array_equal(prefix_bar, np.full((20, 10), 2))


def test_wrong_input_is_named():
    task = FewShot(eos=True)
    regression = task.sample(KEY, 1)
    with pytest.raises(ValueError, match=r"eos: expected an array of shape \(10,\), got nothing"):
        task.prompt(regression)
    with pytest.raises(ValueError, match=r"prefix: expected nothing: this prompt has none, got \(20, 10\)"):
        task.prompt(regression, eos=EOS_VECTOR, prefix=PREFIX_VECTORS)
    with pytest.raises(ValueError, match="switch: leaves 10 tokens"):
        FewShot(prefix=20, switch=10)
    with pytest.raises(ValueError, match="length: leaves 4 tokens"):
        FewShot(prefix=20, switch=220)

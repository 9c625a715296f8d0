"""One sequence over eight devices, in a process of its own that has so many: equal to the operation on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from mesascope.ops.sharded import mesa_attention_sharded
from tests.helpers import draw

ROOT = Path(__file__).parents[2]

# The same in the subprocess, with as many devices as it has been given.
CODE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from mesascope import mesa_attention
from mesascope.ops.sharded import mesa_attention_shard, mesa_attention_sharded
from tests.helpers import TOLERANCE, draw

dtype, method = sys.argv[1:]
jax.config.update("jax_enable_x64", dtype == "float64")
mesh = Mesh(np.array(jax.devices()), ("time",))
assert mesh.shape["time"] == 8
worst = 0.0
for options in (dict(), dict(log_decay=0.3, beta=True), dict(log_decay=0.2, beta=True, segments=True)):
    arguments = draw(lead=(2,), time=48, key=4, value=3, dtype=np.dtype(dtype), **options)
    if "segment_ids" in arguments:  # one that ends where a device's part does, and one over several devices
        ids = np.asarray(arguments["segment_ids"]).copy()
        ids[0] = np.repeat([0, 1, 2, 1], [12, 6, 20, 10])
        arguments["segment_ids"] = jnp.asarray(ids)
    ids = {n: arguments.pop(n) for n in ("segment_ids",) if n in arguments}
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((2, 48, 3)), dtype)

    def loss(function):
        def value(arguments):
            given = dict(arguments)
            q, k, v, lam = (given.pop(n) for n in ("queries", "keys", "values", "lam"))
            out = function(q, k, v, lam, **given, **ids)
            return jnp.sum(weights * out), out
        return jax.jit(jax.grad(value, has_aux=True))

    slow = "reference" if dtype == "float64" else "chunked"
    expected = loss(lambda *a, **k: mesa_attention(*a, **k, method=slow))(arguments)
    found = loss(lambda *a, **k: mesa_attention_sharded(*a, **k, mesh=mesh, method=method))(arguments)
    assert len(found[1].sharding.device_set) == 8
    assert found[1].addressable_shards[0].data.shape == (2, 6, 3)
    for name, a, b in [("out", found[1], expected[1])] + [(n, found[0][n], expected[0][n]) for n in arguments]:
        error = float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(np.asarray(b))))
        assert error <= TOLERANCE[dtype], (options, name, error)
        worst = max(worst, error)
print("equal", worst)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "method"),
    [("float64", "prefix"), ("float64", "recursive"), ("float32", "prefix"), ("float32", "chunked")],
)
def test_time_over_eight_devices(dtype, method):
    """Values and every gradient, with decay, weights and documents that end anywhere."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, dtype, method],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout


def test_times_that_cannot_be_cut():
    mesh = Mesh(np.array(jax.devices()[:1]), ("time",))
    arguments = draw(time=5)
    two = AbstractMesh((2,), ("time",))
    with pytest.raises(ValueError, match="expected a length that is a multiple of the 2 devices, got 5"):
        mesa_attention_sharded(**arguments, mesh=two)
    with pytest.raises(ValueError, match="axis: the mesh has 'time', got 'batch'"):
        mesa_attention_sharded(**arguments, mesh=mesh, axis="batch")

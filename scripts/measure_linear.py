"""Linear attention and the delta rule: kernels beside XLA, float32, medians of five times twenty runs. On a GPU.

python scripts/measure_linear.py                            # the shapes of benchmarks/kernels.md
python scripts/measure_linear.py --shape 192 1024 384 64    # batch · heads, time, width of keys, of values
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from mesascope.bench import sequences
from mesascope.ops.linear import delta_chunked, linear_chunked
from mesascope.ops.pallas_linear import innovations_fused, linear_fused

SHAPES = (
    (384, 1024, 64, 64),
    (128, 2048, 128, 128),
    (1024, 50, 20, 20),
    (5120, 50, 20, 20),
    (64, 1024, 64, 64),
)


def delta_fused(q: Array, k: Array, v: Array, beta: Array) -> Array:
    weighted = beta[..., None] * k
    return linear_fused(q, weighted, innovations_fused(k, weighted, v))


OPS: dict[str, dict[str, Callable[..., Array]]] = {
    "linear": {"kernels": linear_fused, "XLA": lambda *a: linear_chunked(*a)[0]},
    "delta": {"kernels": delta_fused, "XLA": lambda *a: delta_chunked(*a)[0]},
}


def both(op: Callable[..., Array], arguments: tuple[Array, ...], cotangent: Array) -> tuple[Array, ...]:
    out, pull = jax.vjp(op, *arguments)
    return out, *pull(cotangent)


def milliseconds(function: Callable, *arguments: object) -> float:
    run = jax.jit(function)
    jax.block_until_ready(run(*arguments))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(20)])
        samples.append(1e3 * (time.perf_counter() - start) / 20)
    return sorted(samples)[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=4, metavar=("BATCH", "TIME", "KEY", "VALUE"))
    given = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"expected a GPU, but jax runs on {jax.default_backend()}.")
    print("| shape | | by | forward, ms | forward + backward, ms |\n|---|---|---|--:|--:|")
    for shape in (tuple(given.shape),) if given.shape else SHAPES:
        batch, steps, key, value = shape
        q, k, v, g = (jnp.asarray(a, jnp.float32) for a in sequences(batch, steps, key, value=value))
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        for name, ways in OPS.items():
            arguments = (q, k, v, jnp.full((batch, steps), 0.5)) if name == "delta" else (q, k, v)
            for by, op in ways.items():
                alone, whole = milliseconds(op, *arguments), milliseconds(partial(both, op), arguments, g)
                print(f"| {shape} | {name} | {by} | {alone:.3f} | {whole:.3f} |", flush=True)


if __name__ == "__main__":
    main()

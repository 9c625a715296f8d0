"""What `mesascope bench` runs: times and memory as ratios within one process, errors against float64."""

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console
from rich.table import Table

from mesascope.ops import delta_attention, linear_attention, mesa_attention
from mesascope.ops.methods import Neumann, Recursive

HIGHEST = jax.lax.Precision.HIGHEST


def classical_scan(
    queries: Float[Array, "batch time key"],
    keys: Float[Array, "batch time key"],
    values: Float[Array, "batch time value"],
    lam: Float[Array, "batch 1"],
    *,
    stores: int | None = None,
) -> Float[Array, "batch time value"]:
    r"""The baseline: Sherman–Morrison for $R_t$, $o_t = S_t(R_t q_t)$, one `lax.scan`, left to autodiff.

    Args:
        stores: keep only every so many-th $R_t$ for the backward pass and recompute the rest: the same numbers in
            less memory. By default all are kept.
    """
    batch, time_steps, d = keys.shape

    def step(carry, inputs):
        r, s = carry
        q, k, v = inputs
        rk = jnp.einsum("bij,bj->bi", r, k, precision=HIGHEST)
        scale = 1 + jnp.sum(k * rk, -1)
        r = r - rk[:, :, None] * rk[:, None, :] / scale[:, None, None]
        s = s + v[:, :, None] * k[:, None, :]
        x = jnp.einsum("bij,bj->bi", r, q, precision=HIGHEST)
        return (r, s), jnp.einsum("bij,bj->bi", s, x, precision=HIGHEST)

    r = lam[..., None] * jnp.eye(d, dtype=keys.dtype)
    s = jnp.zeros((batch, values.shape[-1], d), keys.dtype)
    inputs = tuple(jnp.moveaxis(a, 1, 0) for a in (queries, keys, values))
    if stores is None:
        _, out = jax.lax.scan(step, (r, s), inputs)
    else:
        size = max(n for n in range(1, stores + 1) if time_steps % n == 0)
        blocks = tuple(a.reshape(-1, size, *a.shape[1:]) for a in inputs)
        _, out = jax.lax.scan(jax.checkpoint(lambda c, x: jax.lax.scan(step, c, x)), (r, s), blocks)
        out = out.reshape(time_steps, *out.shape[2:])
    return jnp.moveaxis(out, 0, 1)


Op = Callable[[Array, Array, Array, Array], Array]


def _delta(q: Array, k: Array, v: Array, lam: Array) -> Array:
    rate = jnp.broadcast_to(lam / (lam + 1), k.shape[:-1])
    out = delta_attention(q, k, v, rate)
    assert isinstance(out, Array)
    return out


def _linear(q: Array, k: Array, v: Array, lam: Array) -> Array:
    out = linear_attention(q, k, v)
    assert isinstance(out, Array)
    return out


OPS: dict[str, Op] = {
    "autodiff of the scan": classical_scan,
    "mesa, chunked": lambda q, k, v, lam: mesa_attention(q, k, v, lam, method="chunked"),
    "mesa, prefix": lambda q, k, v, lam: mesa_attention(q, k, v, lam, method="prefix"),
    "mesa, fused kernels": lambda q, k, v, lam: mesa_attention(q, k, v, lam, method="pallas"),
    "mesa, recursive (reverse-time backward)": lambda q, k, v, lam: mesa_attention(
        q, k, v, lam, method=Recursive(backward="reverse_time")
    ),
    "Neumann, 16 steps": lambda q, k, v, lam: mesa_attention(q, k, v, lam, method=Neumann(steps=16)),
    "Neumann, 16 steps, precomputed": lambda q, k, v, lam: mesa_attention(
        q, k, v, lam, method=Neumann(steps=16, precompute=True)
    ),
    "delta rule": _delta,
    "linear attention": _linear,
}
SLOW = ("mesa, recursive (reverse-time backward)", "Neumann, 16 steps, precomputed")
KERNELS = ("mesa, fused kernels",)  # interpreted, and so not worth timing, without a GPU


def sequences(
    batch: int, time: int, key: int, *, value: int | None = None, kind: str = "unit", seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys, values and output cotangents, float32.

    Args:
        value: width of values, by default that of keys.
        kind: keys: `gaussian`, `unit` (norm), `dynamics` ($k_{t+1} = W k_t + .01\\,\\epsilon$, W orthogonal), or
            `deficient` (rank d/4 plus 1e-3 noise).
    """
    rng = np.random.default_rng(seed)
    q, v, g = (rng.standard_normal((batch, time, n or key)) for n in (key, value, value))
    if kind == "dynamics":
        w, _ = np.linalg.qr(rng.standard_normal((batch, key, key)))
        k = np.empty((batch, time, key))
        state = rng.standard_normal((batch, key))
        for t in range(time):
            k[:, t] = state
            state = np.einsum("bij,bj->bi", w, state) + 0.01 * rng.standard_normal((batch, key))
    elif kind == "deficient":
        rank = max(1, key // 4)
        basis = rng.standard_normal((batch, rank, key)) / np.sqrt(rank)
        k = rng.standard_normal((batch, time, rank)) @ basis + 1e-3 * rng.standard_normal((batch, time, key))
    else:
        k = rng.standard_normal((batch, time, key))
        if kind == "unit":
            k /= np.linalg.norm(k, axis=-1, keepdims=True)
        elif kind != "gaussian":
            raise ValueError(f"kind: expected gaussian, unit, dynamics or deficient, got {kind!r}.")
    q, k, v, g = (np.asarray(a, np.float32) for a in (q, k, v, g))
    return q, k, v, g


def with_gradients(op: Op) -> Callable[..., tuple[Array, ...]]:
    """The output and the gradients with respect to q, k, v and λ."""

    def run(q: Array, k: Array, v: Array, lam: Array, cotangent: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(op, q, k, v, lam)
        return out, *pull(cotangent)

    return run


def exact64(q: np.ndarray, k: np.ndarray, v: np.ndarray, lam: float, g: np.ndarray) -> list[np.ndarray]:
    """Output and gradients by dense solves in float64 (numpy; shares no code with the library).

    Each solve is refined once in extended precision: x·z, the gradient of λ, cancels.
    """
    q, k, v, g = (a.astype(np.float64) for a in (q, k, v, g))
    batch, time, d = k.shape
    h = np.broadcast_to(np.eye(d, dtype=np.longdouble) / lam, (batch, d, d)).copy()
    s = np.zeros((batch, v.shape[-1], d), np.longdouble)
    out, x, z = np.empty_like(v), np.empty(q.shape, np.longdouble), np.empty(q.shape, np.longdouble)
    for t in range(time):
        h += k[:, t, :, None] * k[:, t, None, :]
        s += v[:, t, :, None] * k[:, t, None, :]
        pulled = np.einsum("bvd,bv->bd", s, g[:, t])
        rhs, rounded = np.stack([q[:, t], pulled], -1), h.astype(np.float64)
        both = np.linalg.solve(rounded, rhs.astype(np.float64)).astype(np.longdouble)
        both += np.linalg.solve(rounded, (rhs - h @ both).astype(np.float64))
        x[:, t], z[:, t] = both[..., 0], both[..., 1]
        out[:, t] = np.einsum("bvd,bd->bv", s, x[:, t])
    p, w = np.zeros((batch, d, v.shape[-1])), np.zeros((batch, d, d))
    dk, dv = np.empty_like(k), np.empty_like(v)
    for t in reversed(range(time)):
        p += x[:, t, :, None] * g[:, t, None, :]
        xz = x[:, t, :, None] * z[:, t, None, :]
        w += xz + np.swapaxes(xz, 1, 2)
        dv[:, t] = np.einsum("bdv,bd->bv", p, k[:, t])
        dk[:, t] = np.einsum("bdv,bv->bd", p, v[:, t]) - np.einsum("bij,bj->bi", w, k[:, t])
    lam_bar = (x * z).sum((1, 2))[:, None] / lam**2
    return [np.asarray(a, np.float64) for a in (out, z, dk, dv, lam_bar)]


def relative_error(value: Any, exact: np.ndarray, *, zero: float = 1.0) -> float:
    """Over the whole array; relative to `zero` where the exact answer vanishes (∂k does at λk² = 1, T = 1)."""
    norm = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(np.asarray(value, np.float64) - exact))
    return error / (norm if norm > 1e-12 * zero else zero)


@cache
def _compiled(name: str) -> Callable[..., tuple[Array, ...]]:
    op = partial(classical_scan, stores=64) if OPS[name] is classical_scan else OPS[name]
    return jax.jit(with_gradients(op))


def in_groups(name: str, q: Any, k: Any, v: Any, lam: float, g: Any) -> list[np.ndarray]:
    """`OPS[name]` and its gradients, as many sequences at a time as memory allows."""
    batch, time_steps, d = k.shape
    room = (2**31 if jax.default_backend() == "gpu" else 2**29) // (8 * min(time_steps, 64) * d**2)
    size = min(batch, 2 ** max(0, room.bit_length() - 1))
    parts = []
    for i in range(0, batch, size):
        rows = [jnp.asarray(a[i : i + size]) for a in (q, k, v, g)]
        lams = jnp.full((len(rows[0]), 1), lam, rows[0].dtype)
        parts.append([np.asarray(a) for a in _compiled(name)(*rows[:3], lams, rows[3])])
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def errors(
    name: str, inputs: tuple[np.ndarray, ...], lam: float, exact: list[np.ndarray] | None = None
) -> list[float]:
    """Relative errors of the output and of the gradients with respect to q, k, v, λ, in float32."""
    q, k, v, g = inputs
    exact = exact64(q, k, v, lam, g) if exact is None else exact
    scale = float(np.linalg.norm(g))
    got = in_groups(name, q, k, v, lam, g)
    return [relative_error(a, b, zero=scale) for a, b in zip(got, exact, strict=True)]


@dataclass
class Timing:
    """Milliseconds over repeats: median and quartiles."""

    median: float
    low: float
    high: float
    compile_s: float = 0.0


def timings(
    functions: dict[str, Callable], arguments: tuple, *, repeats: int, seconds: float = 60.0
) -> dict[str, Timing]:
    """Time functions in turn, round by round, so that a noisy stretch hits all of them.

    A sample is the second of two calls: the first one pays for memory and caches that its predecessor left cold
    (after the scan's gigabytes, half as long again). On a GPU it is the mean of ten sent off one after the other,
    as training does.
    """
    calls = 10 if jax.default_backend() == "gpu" else 1
    compiled, compile_s = {}, {}
    for name, function in functions.items():
        start = time.perf_counter()
        compiled[name] = function if isinstance(function, jax.stages.Compiled) else jax.jit(function)
        jax.block_until_ready(compiled[name](*arguments))
        compile_s[name] = time.perf_counter() - start
        jax.block_until_ready(compiled[name](*arguments))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    begin = time.perf_counter()
    for round_number in range(repeats):
        for name, function in compiled.items():
            jax.block_until_ready(function(*arguments))
            start = time.perf_counter()
            jax.block_until_ready([function(*arguments) for _ in range(calls)])
            samples[name].append(1e3 * (time.perf_counter() - start) / calls)
        if time.perf_counter() - begin > seconds and round_number >= 2:
            break
    return {
        name: Timing(*np.percentile(s, (50, 25, 75)).tolist(), compile_s=compile_s[name])
        for name, s in samples.items()
    }


def temporary_megabytes(function: Callable, arguments: tuple) -> float:
    """XLA's own account of the peak temporary memory."""
    analysis = jax.jit(function).lower(*arguments).compile().memory_analysis()
    if analysis is None:
        raise RuntimeError("this backend does not tell how much memory a program takes")
    return analysis.temp_size_in_bytes / 2**20


@dataclass
class Report:
    """Everything measured, ready for JSON."""

    machine: dict[str, Any] = field(default_factory=dict)
    speed: list[dict[str, Any]] = field(default_factory=list)
    scaling: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    accuracy: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.__dict__, indent=1) + "\n")


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": f"{device.platform}: {device.device_kind}",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def _inputs(shape: tuple[int, int, int], lam: float = 1.0) -> tuple:
    q, k, v, g = (jnp.asarray(a) for a in sequences(*shape))
    return q, k, v, jnp.full((shape[0], 1), lam, jnp.float32), g


def speed_table(
    console: Console, report: Report, shape: tuple[int, int, int], *, repeats: int, skip: tuple[str, ...] = ()
) -> None:
    arguments = _inputs(shape)
    skip = skip if jax.default_backend() == "gpu" else (*skip, *KERNELS)
    functions = {name: with_gradients(op) for name, op in OPS.items() if name not in skip}
    forward = {
        f"{name} (forward only)": lambda q, k, v, lam, g, op=OPS[name]: op(q, k, v, lam)
        for name in ("mesa, chunked", *KERNELS)
        if name not in skip
    }
    with console.status(f"timing (batch·heads, time, width) = {shape}"):
        measured = timings(functions | forward, arguments, repeats=repeats)
    table = Table(title=f"forward + backward at (batch·heads, time, width) = {shape}, float32, median ms")
    for column in ("", "ms", "quartiles", "× linear", "scan ÷", "compile s"):
        table.add_column(column, justify="left" if not column else "right")
    linear, scan = measured["linear attention"].median, measured.get("autodiff of the scan")
    for name, t in measured.items():
        faster = f"{scan.median / t.median:.1f}" if scan else "-"
        table.add_row(
            name, f"{t.median:.2f}", f"{t.low:.2f} to {t.high:.2f}", f"{t.median / linear:.2f}", faster,
            f"{t.compile_s:.1f}",
        )  # fmt: skip
        report.speed.append({"shape": shape, "op": name} | t.__dict__)
    console.print(table)


def scaling_table(
    console: Console, report: Report, *, batch: int, short: int, long: int, repeats: int
) -> None:
    op = with_gradients(OPS["mesa, chunked"])
    with console.status("cost against length"):
        times = {
            t: timings({"op": op}, _inputs((batch, t, 64)), repeats=repeats)["op"].median
            for t in (short, long)
        }
    ratio = times[long] / times[short]
    report.scaling |= {f"time({long})/time({short})": ratio}
    console.print(f"time({long}) / time({short}) at width 64, batch {batch}: [bold]{ratio:.2f}[/]")


def memory_table(console: Console, report: Report, shape: tuple[int, int, int]) -> None:
    b, t, d = shape
    with console.status("memory"):
        ours = temporary_megabytes(with_gradients(OPS["mesa, chunked"]), _inputs(shape))
        double = temporary_megabytes(with_gradients(OPS["mesa, chunked"]), _inputs((b, 2 * t, d)))
        scan = temporary_megabytes(with_gradients(classical_scan), _inputs(shape))
    report.memory |= {"chunked_mb": ours, "chunked_twice_as_long_mb": double, "scan_mb": scan}
    console.print(
        f"temporary memory at {shape}: chunked {ours:.0f} MB, autodiff of the scan {scan:.0f} MB "
        f"([bold]{scan / ours:.1f}×[/]); chunked at twice the length {double / ours:.2f}×"
    )


def accuracy_table(
    console: Console, report: Report, *, time_steps: int, width: int, draws: int, lams: tuple[float, ...]
) -> None:
    title = f"relative error in float32 against float64, time {time_steps}, width {width}, {draws} draws"
    table = Table(title=title, caption="scan: the classical recursion, and autodiff through it")
    for column in ("keys", "λ", "op", "output", "∂q", "∂k", "∂v", "∂λ"):
        table.add_column(column)
    names = {"autodiff of the scan": "scan", "mesa, chunked": "chunked", "mesa, prefix": "prefix"}
    with console.status("errors"):
        for kind in ("unit", "gaussian", "dynamics", "deficient"):
            for lam in lams:
                inputs = sequences(draws, time_steps, width, kind=kind)
                exact = exact64(*inputs[:3], lam, inputs[3])
                for name, label in names.items():
                    row = errors(name, inputs, lam, exact)
                    table.add_row(kind, f"{lam:g}", label, *(f"{e:.1e}" for e in row))
                    report.accuracy.append(
                        {
                            "keys": kind,
                            "lam": lam,
                            "op": name,
                            "time": time_steps,
                            "width": width,
                            "errors": row,
                        }
                    )
    console.print(table)


def bench_ops(*, small: bool, repeats: int, out: Path | None) -> Report:
    """Run the tables and print them; see the command line's help."""
    console, report = begin()
    speed = partial(partial, speed_table, console, report, repeats=repeats)
    errors_of = partial(partial, accuracy_table, console, report)
    if small:
        tables = [
            speed((256, 50, 20), skip=SLOW),
            speed((12, 512, 64), skip=SLOW),
            errors_of(time_steps=256, width=32, draws=2, lams=(1.0, 1e3)),
        ]
    else:
        tables = [
            speed((1024, 50, 20)),
            speed((48, 1024, 64)),
            partial(scaling_table, console, report, batch=4, short=2048, long=8192, repeats=repeats),
            partial(memory_table, console, report, (48, 1024, 64)),
            errors_of(time_steps=1024, width=64, draws=4, lams=(1.0, 10.0, 1e3)),
        ]
    return finish(console, report, tables, out)


def begin() -> tuple[Console, Report]:
    """Where to print and what to write, with the machine in it."""
    console, report = Console(), Report(machine=machine())
    console.print(" · ".join(str(v) for v in report.machine.values()))
    return console, report


def finish(console: Console, report: Report, tables: Sequence[Callable[[], Any]], out: Path | None) -> Report:
    """Measure table by table; what has been measured is written after each."""
    for table in tables:
        table()
        if out is not None:
            report.write(out)
    if out is not None:
        console.print(f"written to {out}")
    return report

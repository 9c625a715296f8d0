"""The fused kernels at the shapes that count, beside flash-linear-attention's `chunk_mesa_net` where that is installed.

Rows of time, peak memory and error against float64, forward and forward + backward, all in one process on one GPU. The
peer is given the same numbers: bfloat16, no forgetting, and thirty steps of conjugate gradients, its default.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mesascope.bench import (
    SLOW,
    Report,
    accuracy_table,
    begin,
    exact64,
    finish,
    memory_table,
    relative_error,
    scaling_table,
    speed_table,
    timings,
    with_gradients,
)
from mesascope.ops import mesa_attention
from mesascope.ops.methods import Method, Pallas

Pass = Literal["forward", "forward+backward"]
LAM = 1.0
FEW = 2
"""Sequences on which errors are measured."""
LONG = 4096
"""Beyond so many tokens, the error is that of the outputs of the first of them, which do not depend on later ones."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one problem: batch · heads, time, width of keys and of values.

    Attributes:
        beside: whether to time the peer there, which tries settings of its kernels for minutes, and takes no keys wider
            than values.
    """

    batch: int
    time: int
    key: int
    value: int
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    beside: bool = False


SHAPES = (
    Shape(batch=1024, time=50, key=20, value=20, dtypes=("float32",)),
    Shape(batch=384, time=1024, key=64, value=64, beside=True),
    Shape(batch=128, time=2048, key=128, value=128, beside=True),
    Shape(batch=192, time=1024, key=384, value=64),
    Shape(batch=8, time=16_384, key=64, value=64, dtypes=("float32",)),
    Shape(batch=8, time=65_536, key=64, value=64, dtypes=("float32",)),
)


def inputs(shape: Shape, dtype: str) -> tuple[jax.Array, ...]:
    """Queries, keys of unit norm, values and cotangents of outputs."""
    sizes = (shape.key, shape.key, shape.value, shape.value)
    seeds = jax.random.split(jax.random.key(0), len(sizes))
    q, k, v, g = (
        jax.random.normal(seed, (shape.batch, shape.time, n), jnp.float32)
        for seed, n in zip(seeds, sizes, strict=True)
    )
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    return tuple(a.astype(dtype) for a in (q, k, v, g))


def functions(method: str | Method) -> dict[Pass, Callable]:
    def op(q: jax.Array, k: jax.Array, v: jax.Array, lam: jax.Array) -> jax.Array:
        out = mesa_attention(q, k, v, lam, method=method)
        assert isinstance(out, jax.Array)
        return out

    return {"forward": lambda q, k, v, lam, g: (op(q, k, v, lam),), "forward+backward": with_gradients(op)}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is compiled and timed: one pass of one method."""

    shape: Shape
    dtype: str
    method: str | Method
    name: Pass

    def compile(self) -> jax.stages.Compiled:
        shape, dtype = self.shape, jnp.dtype(self.dtype)
        q, v = (jax.ShapeDtypeStruct((shape.batch, shape.time, n), dtype) for n in (shape.key, shape.value))
        lam = jax.ShapeDtypeStruct((shape.batch, 1), jnp.float32)
        return jax.jit(functions(self.method)[self.name]).lower(q, q, v, lam, v).compile()


def measure(
    program: Program, compiled: jax.stages.Compiled, exact: list[np.ndarray], *, repeats: int
) -> dict[str, Any]:
    """A row of the table."""
    shape = program.shape
    q, k, v, g = inputs(shape, program.dtype)
    arguments = (q, k, v, jnp.full((shape.batch, 1), LAM, jnp.float32), g)
    time = timings({"": compiled}, arguments, repeats=repeats)[""]
    results = [np.asarray(a[:FEW], np.float64) for a in compiled(*arguments)]
    return {
        "shape": [shape.batch, shape.time, shape.key],
        "value": shape.value,
        "dtype": program.dtype,
        "pass": program.name,
        "method": str(program.method),
        "ms": time.median,
        "quartiles": [time.low, time.high],
        "gigabytes": _peak(compiled),
        "error": error(results, exact, float(np.linalg.norm(np.asarray(g[:FEW], np.float32)))),
    }


def ours(shape: Shape, dtype: str, method: str | Method, *, repeats: int) -> list[dict[str, Any]]:
    """A row for each pass."""
    exact = exactly(shape, dtype)
    programs = (Program(shape=shape, dtype=dtype, method=method, name=name) for name in get_args(Pass))
    return [measure(program, program.compile(), exact, repeats=repeats) for program in programs]


def _peak(compiled: Any) -> float | None:
    """Arguments, outputs and temporary memory, as XLA counts them."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    total = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    return (total - found.alias_size_in_bytes) / 1e9


def exactly(shape: Shape, dtype: str) -> list[np.ndarray]:
    """Outputs and gradients of the first sequences; of long ones, outputs of the first tokens."""
    return _comparable(shape, exact64(*_first(shape, dtype)))


def _first(shape: Shape, dtype: str) -> tuple[Any, ...]:
    """What `exact64` takes, of these."""
    q, k, v, g = (np.asarray(a[:FEW, :LONG], np.float32) for a in inputs(shape, dtype))
    return q, k, v, LAM, g


def _comparable(shape: Shape, exact: list[np.ndarray]) -> list[np.ndarray]:
    return exact if shape.time <= LONG else exact[:1]


def error(results: list[np.ndarray], exact: list[np.ndarray], scale: float) -> float:
    """The largest relative error of what there is of outputs and gradients; relative to `scale` where these vanish."""
    errors = []
    for a, b in zip(results, exact, strict=False):
        cut = a[: len(b)] if a.ndim < 3 else a[: len(b), : b.shape[1]]
        errors.append(relative_error(cut, b, zero=scale))
    return max(errors)


def has_peer() -> bool:
    """Whether flash-linear-attention can be imported."""
    return find_spec("torch") is not None and find_spec("fla") is not None


def theirs(shape: Shape, exact: list[np.ndarray], *, repeats: int) -> dict[Pass, dict[str, Any]]:
    """The peer's time, memory and error, by pass."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.mesa_net import chunk_mesa_net  # pyright: ignore[reportMissingImports]

    heads = math.gcd(shape.batch, 16)
    numpy = [np.asarray(a, np.float32) for a in inputs(shape, "bfloat16")]

    def by_heads(a: np.ndarray) -> Any:
        """Theirs are [batch, time, head, width]."""
        cut = a.reshape(-1, heads, *a.shape[1:]).swapaxes(1, 2)
        return torch.tensor(np.ascontiguousarray(cut), device="cuda", dtype=torch.bfloat16)

    def back(tensor: Any) -> np.ndarray:
        array = tensor.detach().float().cpu().numpy().astype(np.float64)
        return array.swapaxes(1, 2).reshape(shape.batch, shape.time, -1)

    q, k, v = (by_heads(a).requires_grad_() for a in numpy[:3])
    g = by_heads(numpy[3])
    still = torch.zeros(q.shape[:3], device="cuda", dtype=torch.float32)
    lamb = torch.full((heads, shape.key), 1 / LAM, device="cuda", dtype=torch.float32)

    def forward() -> Any:
        return chunk_mesa_net(q, k, v, still, torch.ones_like(still), lamb, max_CG_iteration=30)[0]

    def whole() -> Any:
        return torch.autograd.grad(forward(), (q, k, v), g)

    def median(call: Callable[[], Any]) -> float:
        samples = []
        for _ in range(repeats + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                call()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end) / 10)
        return float(np.median(samples[2:]))

    found: dict[Pass, dict[str, Any]] = {}
    calls: dict[Pass, Callable[[], Any]] = {"forward": forward, "forward+backward": whole}
    for name, call in calls.items():
        call()  # which tries many settings of its kernels, for minutes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradients = call() if name != "forward" else ()
        results = [a[:FEW] for a in (back(forward()), *map(back, gradients))]
        found[name] = {
            "peer_ms": median(call),
            "peer_gigabytes": torch.cuda.max_memory_allocated() / 1e9,
            "peer_error": error(results, exact, float(np.linalg.norm(numpy[3][:FEW]))),
        }
    return found


def kernel_table(
    console: Console,
    rows: list[dict[str, Any]],
    shapes: tuple[Shape, ...] = SHAPES,
    *,
    repeats: int,
    peer: bool | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Measure every shape, and print the table. All is compiled beforehand, side by side.

    Args:
        rows: where to put what was measured.
        after: what to do after every row, such as saving it.
    """
    compiled, exact = prepare(console, shapes)
    measured: dict[Program, dict[str, Any]] = {}
    for program, code in compiled.items():
        with console.status(f"timing {program}"):
            row = measure(program, code.result(), exact[program.shape, program.dtype], repeats=repeats)
        rows.append(row)
        measured[program] = row
        after()
    for shape in (s for s in shapes if s.beside and (has_peer() if peer is None else peer)):
        with console.status(f"timing flash-linear-attention at {shape}"):
            beside = theirs(shape, exact[shape, "bfloat16"], repeats=repeats)
        for program in (p for p in compiled if p.shape == shape):
            measured[program] |= beside[program.name]
        after()
    console.print(_table(list(measured.values())))
    for line in growth(list(measured.values())):
        console.print(line, highlight=False)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="the mesa operation, and flash-linear-attention's (30 steps of conjugate gradients)")
    words = ("shape", "dtype", "pass", "method")
    for column in (*words, "ms", "GB", "error", "theirs: ms", "GB", "error"):
        table.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def prepare(
    console: Console, shapes: tuple[Shape, ...]
) -> tuple[dict[Program, Future], dict[tuple[Shape, str], list[np.ndarray]]]:
    """Every program compiled, and what it should compute, by shape and dtype."""
    programs = [
        Program(shape=shape, dtype=dtype, method=method, name=name)
        for shape in shapes
        for dtype in shape.dtypes
        for method in _worth_timing(shape)
        for name in get_args(Pass)
    ]
    dtypes = {(shape, dtype) for shape in shapes for dtype in shape.dtypes}
    with (
        console.status(f"compiling {len(programs)} programs"),
        ThreadPoolExecutor() as threads,
        ProcessPoolExecutor(mp_context=get_context("spawn")) as processes,  # a GPU does not survive a fork
    ):
        compiled = {program: threads.submit(program.compile) for program in programs}
        solved = {one: processes.submit(exact64, *_first(*one)) for one in dtypes}
        exact = {one: _comparable(one[0], result.result()) for one, result in solved.items()}
    return compiled, exact


def _worth_timing(shape: Shape) -> list[str]:
    """What `mesa_attention` takes by itself, and the kernels, if they take such heads and it does not take them."""
    sides = shape.key, shape.value
    chosen = Pallas.is_fastest(*sides, jnp.float32, plain=True)
    return ["auto"] if chosen or not Pallas.takes(*sides, plain=True) else ["auto", "pallas"]


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """How time grows with length, where only that differs."""
    told = []
    for name in get_args(Pass):
        for method in ("auto", "pallas"):
            long = {
                row["shape"][1]: row["ms"]
                for row in rows
                if (row["shape"][0], row["pass"], row["method"]) == (8, name, method)
            }
            if len(long) > 1:
                short, last = min(long), max(long)
                part = long[last] / long[short] / (last / short) - 1
                told.append(f"{name}, {method}: {last:,} tokens over {short:,}: {part:+.1%} from linear")
    return told


def _cells(row: dict[str, Any]) -> list[str]:
    size = "×".join(map(str, row["shape"])) + (f"→{row['value']}" if row["value"] != row["shape"][2] else "")

    def shown(name: str, form: str) -> str:
        return "" if row.get(name) is None else format(row[name], form)

    numbers = (("ms", ".3g"), ("gigabytes", ".3g"), ("error", ".1e"))
    return [
        size, row["dtype"], row["pass"], row["method"],
        *(shown(name, form) for name, form in numbers), *(shown(f"peer_{name}", form) for name, form in numbers),
    ]  # fmt: skip


def bench_gpu(*, repeats: int, out: Path | None) -> Report:
    """The kernels, and all operations in larger shapes, on a GPU."""
    if jax.default_backend() != "gpu":
        raise SystemExit(f"--gpu: expected a GPU, but jax runs on {jax.default_backend()}.")
    console, report = begin()
    speed = partial(partial, speed_table, console, report, repeats=repeats)
    tables = [
        partial(kernel_table, console, report.rows, repeats=repeats, after=lambda: out and report.write(out)),
        speed((1024, 50, 20)),
        # Storing every H_t or R_t of the larger shapes takes tens of gigabytes.
        speed((5120, 50, 20), skip=SLOW),
        speed((384, 1024, 64), skip=SLOW),
        speed((128, 2048, 128), skip=(*SLOW, "autodiff of the scan")),
        partial(scaling_table, console, report, batch=4, short=2048, long=8192, repeats=repeats),
        partial(memory_table, console, report, (48, 1024, 64)),
        partial(accuracy_table, console, report, time_steps=1024, width=64, draws=4, lams=(1.0, 10.0, 1e3)),
    ]
    return finish(console, report, tables, out)

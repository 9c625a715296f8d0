"""The package as a user meets it: imports, the command line, a wheel, no hang."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mesascope"
# Data flows one way, and imports follow it.
LAYERS = [
    "typing",
    "ops",
    "parts",
    "layer",
    "untrusted",
    "store",
    "mirror",
    "progress",
    "tasks",
    "architecture",
    "taps",
    "models",
    "training",
    "language",
    "theory",
    "analysis",
    "presets",
    "released",
    "provenance",
    "journal",
    "runs",
    "parallel",
    "sinks",
    "bench",
    "bench_kernels",
    "bench_train",
    "bench_language",
    "experiments",
    "sweep",
    "show",
    "report",
    "cli_language",
    "cli",
    "__main__",
]


def run(code: str, timeout: int = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=os.environ | environment, check=False
    )


def test_imports_follow_the_layers():
    seen = 0
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).with_suffix("").parts[0]
        if module == "__init__":
            continue
        assert module in LAYERS, f"{path} is in no layer: add it to LAYERS where it belongs"
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = name.split(".")
                if parts[0] == "mesascope" and len(parts) > 1:
                    seen += 1
                    assert LAYERS.index(parts[1]) <= LAYERS.index(module), f"{path} imports {name}"
    assert seen > 20


def test_import_is_light():
    """No plotting, tokenizers, ray, command line; and no work on a device."""
    code = (
        "import sys, mesascope; "
        "bad = {'matplotlib', 'tokenizers', 'ray', 'tyro', 'rich', 'scipy', 'optax', 'torch'} & set(sys.modules); "
        "import jax; print(sorted(bad), jax._src.xla_bridge.backends_are_initialized())"
    )
    done = run(code)
    assert done.stdout.strip() == "[] False", done.stdout + done.stderr


def test_works_without_float64_enabled():
    code = (
        "import jax, jax.numpy as jnp; from mesascope import mesa_attention\n"
        "k = jax.random.normal(jax.random.key(0), (2, 40, 8))\n"
        "g = jax.grad(lambda k: mesa_attention(k, k, k, 2.0, log_decay=-0.1 * jnp.ones(40)).sum())(k)\n"
        "print(g.dtype, bool(jnp.isfinite(g).all()))"
    )
    assert run(code).stdout.strip() == "float32 True"


def test_no_hang():
    """Batch 1024, forward and backward, 200 times in a fresh process. (LAPACK calls that overlap deadlock jax 0.10.)"""
    code = (
        "import jax, jax.numpy as jnp; from mesascope import mesa_attention\n"
        "k = jax.random.normal(jax.random.key(0), (1024, 20, 8))\n"
        "f = jax.jit(jax.grad(lambda k, lam: mesa_attention(k, k, k, lam).sum(), argnums=(0, 1)))\n"
        "for _ in range(200): jax.block_until_ready(f(k, jnp.ones((1024, 1))))\n"
        "print('done')"
    )
    assert run(code).stdout.strip() == "done"


@pytest.mark.slow
def test_no_hang_at_the_paper_size():
    code = (
        "import jax, jax.numpy as jnp; from mesascope import mesa_attention\n"
        "k = jax.random.normal(jax.random.key(0), (1024, 50, 20))\n"
        "f = jax.jit(jax.grad(lambda k, lam: mesa_attention(k, k, k, lam).sum(), argnums=(0, 1)))\n"
        "for _ in range(200): jax.block_until_ready(f(k, jnp.ones((1024, 1))))\n"
        "print('done')"
    )
    assert run(code).stdout.strip() == "done"


@pytest.mark.slow
def test_benchmark_writes_what_it_prints(tmp_path):
    from rich.console import Console

    from mesascope.bench import Report, accuracy_table, machine, memory_table, scaling_table, speed_table

    console, report = Console(record=True, width=160), Report(machine=machine())
    skip = ("mesa, prefix", "mesa, recursive (reverse-time backward)", "Neumann, 16 steps, precomputed")
    speed_table(console, report, (4, 20, 8), repeats=3, skip=skip)
    memory_table(console, report, (2, 64, 8))
    scaling_table(console, report, batch=1, short=64, long=128, repeats=3)
    accuracy_table(console, report, time_steps=20, width=8, draws=2, lams=(1.0,))
    report.write(tmp_path / "report.json")
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["machine"]["jax"]
    assert {row["op"] for row in stored["speed"]} > {
        "mesa, chunked",
        "linear attention",
        "autodiff of the scan",
    }
    assert stored["memory"]["scan_mb"] > stored["memory"]["chunked_mb"] > 0
    assert all(max(row["errors"]) < 1e-2 for row in stored["accuracy"])
    printed = console.export_text()
    for row in stored["speed"]:
        assert row["op"] in printed
        assert f"{row['median']:.2f}" in printed


def test_command_line_says_what_it_can_do():
    listed = subprocess.run(
        [sys.executable, "-m", "mesascope", "--help"], capture_output=True, text=True, check=True
    )
    assert "bench" in listed.stdout
    assert "reproduce" in listed.stdout
    wrong = subprocess.run([sys.executable, "-m", "mesascope", "benhc"], capture_output=True, text=True)
    assert wrong.returncode != 0
    no_gpu = subprocess.run(
        [sys.executable, "-m", "mesascope", "bench", "ops", "--gpu"],
        capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert no_gpu.returncode != 0
    assert "expected a GPU" in no_gpu.stderr


@pytest.mark.slow
def test_wheel_installs_in_an_empty_environment(tmp_path):
    """Built, installed without the checkout, imported, run."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], check=True)
    code = "import mesascope, jax.numpy as jnp; print(mesascope.mesa_attention(*[jnp.ones((3, 2))] * 3, 1.0).shape)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "(3, 2)"

"""Every kernel of the mesa operation: what it compiles to for an H200 (no GPU needed), or how long it takes on a GPU.

pip install jax-cuda13-pjrt triton                   # for `static`: XLA's compiler for GPUs; triton has the tools
python scripts/inspect_kernels.py static
python scripts/inspect_kernels.py static --shape 128 2048 128 --warps 8
python scripts/inspect_kernels.py time               # on a GPU: the whole, and each kernel as the profiler has it

`static` has XLA compile forward and backward for a device that is only described, and reads what it hands to the
assembler: registers per thread, bytes of stack (what registers did not hold), instructions by kind; and the memory of
the whole, and how long compiling took. `time` runs forward and backward: the median of five times twenty runs, and
every kernel's part of one.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesascope.bench import sequences
from mesascope.ops import kernels, pallas, pallas_chunks, pallas_prefix
from mesascope.ops.sequence import Sequence

KINDS = ("HGMMA", "HMMA", "DMMA", "SHFL", "LDS", "STS", "BAR", "LDG", "STG", "LDL", "STL")
FOLDER = "MESASCOPE_KERNELS_FOLDER"  # where `static` keeps what the assembler was given
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 } runtime_version { major: 13 minor: 0 patch: 0 }
"""


def tools() -> Path:
    found = find_spec("triton")
    if found is None or found.origin is None or find_spec("jax_plugins.xla_cuda13") is None:
        sys.exit("static: expected XLA's compiler and the assembler. pip install jax-cuda13-pjrt triton")
    return Path(found.origin).parent / "backends" / "nvidia"


def in_place_of_a_toolkit(folder: Path) -> dict[str, str]:
    """Environment variables that have XLA call an assembler which keeps a copy of what it is given."""
    for part in ("bin", "nvvm/libdevice", "given"):
        (folder / part).mkdir(parents=True)
    (folder / "nvvm" / "libdevice" / "libdevice.10.bc").symlink_to(tools() / "lib" / "libdevice.10.bc")
    assembler = folder / "bin" / "ptxas"
    assembler.write_text(
        f'#!/bin/sh\nfor a in "$@"; do grep -qs "[.]entry" "$a" && cp "$a" {folder}/given/$$.ptx; done\n'
        f'exec {tools()}/bin/ptxas "$@"\n'
    )
    assembler.chmod(0o755)
    flags = f"--xla_gpu_cuda_data_dir={folder} --xla_gpu_enable_libnvptxcompiler=false"
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", FOLDER: str(folder)}


def described_device() -> jax.sharding.Sharding:
    """Where there is no GPU: one that can be compiled for."""
    from jax._src import xla_bridge
    from jax._src.pallas.triton import pallas_call_registration
    from jax.experimental.topologies import TopologyDescription

    if hasattr(pallas_call_registration, "gpu_info_lib"):  # jax 0.11 asks the GPU what it is
        hopper = types.SimpleNamespace(compute_capability=90)
        pallas_call_registration.gpu_info_lib.get_gpu_info = lambda: hopper  # pyright: ignore
    xla_bridge._discover_and_register_pjrt_plugins()  # pyright: ignore
    make: Any = xla_bridge._topology_factories["cuda"]  # pyright: ignore
    devices = TopologyDescription(
        make("", topology="1x1x1", target_config=H200)._make_compile_only_devices()
    ).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def assembled(folder: Path) -> Iterator[str]:
    """A row for every kernel that the assembler was given, in the order of their names."""
    for path in folder.glob("given/*.ptx"):
        name = re.findall(r"\.entry (\w+)", path.read_text())[0]
        if name.startswith("_"):  # ours, not XLA's
            code = path.with_suffix(".cubin")
            said = subprocess.run(
                [tools() / "bin" / "ptxas", "-v", "-arch=sm_90a", path, "-o", code],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
            numbers = [re.findall(f, said)[-1] for f in (r"Used (\d+) registers", r"(\d+) bytes stack")]
            listing = subprocess.run(
                [tools() / "bin" / "nvdisasm", "-c", code], capture_output=True, text=True, check=True
            ).stdout
            operations = re.findall(
                r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE
            )
            kinds = Counter(operations)
            rest = " ".join(f"{kind} {kinds[kind]}" for kind in KINDS if kinds[kind])
            yield f"| {name} | {' | '.join(numbers)} | {kinds.total()} | {rest} |"
        path.unlink()


def milliseconds(function: Callable, arguments: Any) -> float:
    jax.block_until_ready(function(*arguments))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(20)])
        samples.append(1e3 * (time.perf_counter() - start) / 20)
    return sorted(samples)[2]


def by_kernel(function: Callable, arguments: Any, *, runs: int = 3) -> tuple[Counter[str], Counter[str]]:
    """Nanoseconds of all programs on the GPU, and how often they ran, by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([function(*arguments) for _ in range(runs)])
        data = jax.profiler.ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb"))))
    spent, often = Counter[str](), Counter[str]()
    for plane in data.planes:
        for line in plane.lines:
            if "GPU" in plane.name and "Stream" in line.name:
                for event in line.events:
                    name = re.sub(r"__\d+$", "", event.name)  # XLA numbers calls of a kernel that differ
                    spent[name] += event.duration_ns / runs
                    often[name] += 1
    return spent, Counter({name: count // runs for name, count in often.items()})


def with_warps(call: Callable, warps: int | None, /, *given: Any, **settings: Any) -> Any:
    """In place of `call_by_block`."""
    if warps and settings["warps"] > 1:
        settings["warps"] = warps
    return call(*given, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["static", "time"])
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[384, 1024, 64], metavar=("BATCH", "TIME", "WIDTH")
    )
    parser.add_argument("--value", type=int, help="width of values, if another")
    parser.add_argument("--warps", type=int, help="instead of a kernel's own, unless that is one")
    parser.add_argument(
        "--six", choices=["none", "some", "all"], help="products as six of bfloat16, not three of TF32"
    )
    parser.add_argument("--abreast", type=int, help="how many chunks are taken at once")
    parser.add_argument("--prefix-only", action="store_true", help="not the walks by blocks")
    parser.add_argument("--beta", action="store_true", help="pairs have weights")
    parser.add_argument("--bfloat16", action="store_true", help="inputs and outputs in bfloat16")
    given = parser.parse_args()
    if given.what == "time" and jax.default_backend() != "gpu":
        sys.exit(f"time: expected a GPU, but jax runs on {jax.default_backend()}.")
    if given.what == "static" and FOLDER not in os.environ:  # XLA reads these when it is loaded
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | in_place_of_a_toolkit(Path(folder))
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    warnings.simplefilter("ignore")  # jax 0.11 calls the compiler of the kernels deprecated
    kernels.interpreted = lambda: False
    some = pallas_chunks.SIX
    pallas_chunks.SIX = dict(none=(), some=some, all=(*some, (1, 1), (0, 1)))[given.six or "some"]
    if given.abreast:
        pallas_chunks._ABREAST = dict.fromkeys(pallas_chunks._ABREAST, given.abreast)
    dtype = jnp.bfloat16 if given.bfloat16 else jnp.float32
    kernels.call_by_block = pallas_chunks.call_by_block = partial(
        with_warps, kernels.call_by_block, given.warps
    )
    batch, time_steps, width = given.shape
    widths = (width, width, given.value or width, given.value or width)

    def forward(q: Any, k: Any, v: Any, _: Any) -> Any:
        beta = jnp.ones((batch, time_steps)) if given.beta else None
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))  # as `mesa_attention` does
        seq = Sequence(q, k, v, jnp.ones((batch, width)), None, beta, None, None, None)
        return pallas.fused(pallas.plan(seq, False, given.bfloat16), seq)[0].astype(dtype)

    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, g), q, k, v)
        return out, pull(g)

    legs = pallas_prefix.applies
    print(f"(batch·heads, time, width) = {tuple(given.shape)}\n")
    columns = ["calls", "ms"] if given.what == "time" else ["registers", "stack", "instructions", ""]
    print("|kernel|" + "|".join(columns) + "|\n|---" + "|---" * len(columns) + "|", flush=True)
    for pallas_prefix.applies in (legs,) if given.prefix_only else (lambda seq: False, legs):
        if given.what == "time":
            arrays = [
                jnp.asarray(a[..., :n], dtype) for a, n in zip(sequences(*given.shape), widths, strict=True)
            ]
            for name, function in (("forward", forward), ("forward + backward", both)):
                run = jax.jit(partial(function))  # each time another function: traced again
                print(f"| all, {name} | | {milliseconds(run, arrays):.3f} |", flush=True)
            spent, often = by_kernel(run, arrays)
            for name, nanoseconds in spent.most_common():
                print(f"| {name} | {often[name]} | {nanoseconds / 1e6:.3f} |", flush=True)
            continue
        device = described_device()
        structs = [jax.ShapeDtypeStruct((batch, time_steps, n), dtype, sharding=device) for n in widths]
        lowered = jax.jit(partial(both)).trace(*structs).lower(lowering_platforms=("cuda",))
        start = time.perf_counter()
        memory: Any = lowered.compile().memory_analysis()
        seconds = time.perf_counter() - start
        print(*sorted(assembled(Path(os.environ[FOLDER]))), sep="\n")
        sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
        print(
            "| arguments, outputs, temporary: " + ", ".join(f"{n / 1e6:.0f} MB" for n in sizes),
            f"| compiled in {seconds:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Every kernel of the mesa operation alone: what it compiles to (no GPU needed), or how long it takes (on a GPU).

python scripts/inspect_kernels.py static             # needs `pip install triton`, whose ptxas needs no GPU
python scripts/inspect_kernels.py static --warps 4 8
python scripts/inspect_kernels.py time --shape 384 1024 64

`static` compiles for sm_90 with the compiler of PyPI's triton, a relative of the one within XLA: registers per thread,
bytes of stack (what registers did not hold), shared memory, and instructions by kind. `time` runs each kernel on its
own in a loop of twenty; outputs that would take over an input's memory get their own.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mesascope.bench import sequences
from mesascope.ops import kernels, pallas, pallas_prefix
from mesascope.ops.sequence import Sequence

KINDS = ("HGMMA", "HMMA", "DMMA", "FFMA", "DFMA", "SHFL", "LDS", "STS", "BAR", "LDG", "STG", "LDL", "STL")
original = kernels.call_by_block


def assembled(text: str, warps: int, folder: Path) -> tuple[Path, int]:
    """The machine code of a module in Triton's language, and its bytes of shared memory."""
    from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget, Language  # pyright: ignore[reportMissingImports]
    from triton.compiler.compiler import make_backend  # pyright: ignore[reportMissingImports]

    source, code = folder / "kernel.ttir", folder / "kernel.cubin"
    source.write_text(text)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(num_warps=warps, num_stages=1))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module: Any = ir.parse_mlir_module(str(source), context)
    module.context = context
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, options, Language.TRITON)
    metadata = {"target": target, **options.__dict__}
    for stage in stages.values():  # all of them: `triton.compile` would leave out the first
        module = stage(module, metadata)
    code.write_bytes(module)
    return code, metadata["shared"]


def static(name: str, text: str, warps: int) -> None:
    import triton  # pyright: ignore[reportMissingImports]

    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        code, shared = assembled(text, warps, Path(folder))

        def ask(*command: str) -> str:
            return subprocess.run(
                [tools / command[0], *command[1:], code], capture_output=True, text=True, check=True
            ).stdout

        usage, listing = ask("cuobjdump", "--dump-resource-usage"), ask("nvdisasm", "-c")
    registers, stack = (re.findall(rf"{word}:(\d+)", usage)[-1] for word in ("REG", "STACK"))
    kinds = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE))
    rest = " ".join(f"{kind} {kinds[kind]}" for kind in KINDS if kinds[kind])
    print(f"| {name} | {warps} | {registers} | {stack} | {shared} | {kinds.total()} | {rest} |", flush=True)


def lowered(call: Callable, arguments: Any) -> str:
    """A kernel in Triton's language."""
    from jax._src.pallas.triton import lowering, pallas_call_registration

    texts: list[str] = []
    lower = lowering.lower_jaxpr_to_triton_module

    def keep(*args: Any, **settings: Any) -> Any:
        result = lower(*args, **settings)
        texts.append(str(result.module.operation.get_asm()))
        return result

    if hasattr(pallas_call_registration, "gpu_info_lib"):  # jax 0.11 asks the GPU what it is
        hopper = types.SimpleNamespace(compute_capability=90)
        pallas_call_registration.gpu_info_lib.get_gpu_info = lambda: hopper  # pyright: ignore
    lowering.lower_jaxpr_to_triton_module = keep
    try:
        jax.jit(call).trace(arguments).lower(lowering_platforms=("cuda",))
    finally:
        lowering.lower_jaxpr_to_triton_module = lower
    return texts[-1]


def milliseconds(function: Callable, arguments: Any) -> float:
    jax.block_until_ready(function(arguments))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([function(arguments) for _ in range(20)])
        samples.append(1e3 * (time.perf_counter() - start) / 20)
    return sorted(samples)[2]


def inspected(
    given: argparse.Namespace, kernel: Any, inputs: Any, outputs: Any, *, warps: int, **settings: Any
) -> Any:
    name = (kernel.func if isinstance(kernel, partial) else kernel).__name__
    inputs = {n: a for n, a in inputs.items() if a is not None}
    alone = {n: s for n, s in settings.items() if n != "in_place"}
    if given.what == "static":
        structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs)
        text = lowered(lambda a: original(kernel, a, outputs, warps=warps, **alone), structs)
        for count in (given.warps if warps > 1 else None) or [warps]:
            static(name, text, count)
    else:
        for count in (given.warps if warps > 1 else None) or [warps]:
            run = jax.jit(lambda a, count=count: original(kernel, a, outputs, warps=count, **alone))
            print(f"| {name} | {count} | {milliseconds(run, inputs):.3f} |", flush=True)
    return original(kernel, inputs, outputs, warps=warps, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["static", "time"])
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[384, 1024, 64], metavar=("BATCH", "TIME", "WIDTH")
    )
    parser.add_argument("--warps", type=int, nargs="*", help="instead of a kernel's own, unless that is one")
    parser.add_argument("--beta", action="store_true", help="pairs have weights")
    given = parser.parse_args()
    if given.what == "time" and jax.default_backend() != "gpu":
        sys.exit(f"time: expected a GPU, but jax runs on {jax.default_backend()}.")
    warnings.simplefilter("ignore")  # jax 0.11 calls the compiler deprecated
    kernels.interpreted = lambda: False
    kernels.call_by_block = pallas_prefix.call_by_block = partial(inspected, given)
    batch, time_steps, width = given.shape

    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        seq = Sequence(
            q, k, v, jnp.ones((batch, width), q.dtype), None,
            jnp.ones((batch, time_steps), q.dtype) if given.beta else None, None, None, None,
        )  # fmt: skip
        out, pull = jax.vjp(lambda seq: pallas.fused(pallas.plan(seq, False), seq)[0], seq)
        return out, pull(g)

    print(f"(batch·heads, time, width) = {tuple(given.shape)}\n")
    columns = ["kernel", "warps"]
    columns += ["registers", "stack", "shared", "instructions", ""] if given.what == "static" else ["ms"]
    print("|".join(["", *columns, ""]) + "\n" + "|---" * len(columns) + "|")
    for pallas.PREFIX in (False, True):
        if given.what == "static":
            struct = jax.ShapeDtypeStruct((batch, time_steps, width), jnp.float32)
            jax.eval_shape(partial(both), *[struct] * 4)  # each time another function: traced again
        else:
            both(*(jnp.asarray(a) for a in sequences(*given.shape)))


if __name__ == "__main__":
    main()

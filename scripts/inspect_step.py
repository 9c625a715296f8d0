"""What a training step compiles to for an H200, without one: its kernels, and the bytes that they read and write.

An estimate: loops within a step count once, and arrays of which a kernel reads a part count whole.

pip install jax-cuda13-pjrt triton
python scripts/inspect_step.py softmax-7 --variant as_written
python scripts/inspect_step.py softmax-7 --variant as_written --no-in-place  # see `ops.softmax.IN_PLACE`
"""

import argparse
import dataclasses
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from inspect_kernels import FOLDER, described_device, in_place_of_a_toolkit

from mesascope.ops import softmax
from mesascope.presets import preset
from mesascope.training import Trainer, with_train

SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "f64": 8, "u64": 8, "s64": 8, "u8": 1, "s8": 1}
BANDWIDTH = 4e12
"""Bytes per second that kernels get on an H200."""
INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
FREE = {"parameter", "get-tuple-element", "tuple", "constant", "bitcast", "after-all"}


def size(types: str) -> int:
    """Bytes of all arrays that are named."""
    found = re.findall(rf"\b({'|'.join(SIZES)})\[([\d,]*)\]", types)
    return sum(SIZES[kind] * math.prod(int(n) for n in sides.split(",") if n) for kind, sides in found)


def loop_body(program: str) -> list[str]:
    """The instructions of the longest loop: that over steps."""
    bodies = defaultdict(list)
    name = ""
    for line in program.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", line):
            name = begins[1]
        elif line.startswith("  "):
            bodies[name].append(line.strip())
    return max((bodies[name] for name in re.findall(r"body=%?([\w.\-]+)", program)), key=len)


def kernels(body: list[str]) -> Iterator[tuple[str, int]]:
    """Kinds of kernels, and what each reads and writes."""
    types: dict[str, str] = {}
    for line in body:
        if (found := INSTRUCTION.match(line)) is None:
            continue
        name, types[found[1]], operation, rest = found.groups()
        if operation in FREE:
            continue
        kind = operation
        if operation == "fusion" and (how := re.search(r"kind=k(\w+)", rest)):
            kind = "matrix product" if "__triton" in rest else f"fusion, {how[1].lower()}"
        if operation == "custom-call" and (target := re.search(r'custom_call_target="([^"]+)"', rest)):
            kind = "our kernel" if "triton" in target[1] else target[1]
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
        yield kind, size(types[name]) + sum(size(types.get(operand, "")) for operand in operands)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset")
    parser.add_argument("--variant", choices=["as_run", "as_written"], default="as_run")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--in-place",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="softmax kernels read where products leave it",
    )
    given = parser.parse_args()
    if FOLDER not in os.environ:  # XLA reads these when it is loaded
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | in_place_of_a_toolkit(Path(folder))
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    device = described_device()
    jax.default_backend = lambda: "gpu"  # what chooses kernels looks here
    softmax.IN_PLACE = given.in_place
    config = with_train(preset(given.preset, given.variant), seeds=given.seeds)
    trainer = Trainer(dataclasses.replace(config, model=dataclasses.replace(config.model, tf32=True)))
    state, steps = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device),
        (trainer.shapes, jax.ShapeDtypeStruct((), jnp.int32)),
    )
    program = trainer._many_steps.trace(state, steps).lower(lowering_platforms=("cuda",)).compile().as_text()
    count, total = Counter(), Counter()
    for kind, moved in kernels(loop_body(program)):
        count[kind] += 1
        total[kind] += moved
    print("| | kernels | MB | ms at 4 TB/s |\n|---|--:|--:|--:|")
    for kind, moved in [*total.most_common(), ("all", total.total())]:
        number = count.get(kind, count.total())
        print(f"| {kind} | {number} | {moved / 1e6:.0f} | {1e3 * moved / BANDWIDTH:.2f} |")


if __name__ == "__main__":
    main()

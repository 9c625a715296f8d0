"""What the models of the whole paper cost, for so many seeds on so many GPUs.

    python scripts/plan_sweep.py --seeds 100 --gpus 1 8 64

Steps are the presets'. Times of a step were measured on one H200 for three presets (`mesascope train PRESET`, as run,
five seeds side by side: `steps_per_second` in `timing.json`); a layer of the others is reckoned as the nearest of those
three, in proportion to heads × width × tokens where it has more, and with MLPs 1.3 times as long
(benchmarks/kernels.md).
"""

import argparse
import heapq

from mesascope.models import Mesa
from mesascope.presets import PRESETS, preset
from mesascope.training import Config

# Milliseconds per step, five seeds at once.
MEASURED = {"hybrid-mesa": 1.67, "partial-hybrid-mesa": 4.38, "partial-softmax-7": 10.26}
WITH_MLP = 1.3
AT_ONCE = 5


def work(config: Config) -> float:
    """Of one layer: heads × width × tokens in a step."""
    block = config.model.blocks[-1]
    return block.heads * block.key_dim * config.train.batch_size * config.task.length


def milliseconds(name: str) -> float:
    """Of one step of five seeds."""
    if name in MEASURED:
        return MEASURED[name]
    config = preset(name)
    blocks = config.model.blocks
    wide = blocks[-1].heads > 4
    mesa = any(isinstance(block.mixer, Mesa) for block in blocks)
    like = "hybrid-mesa" if not wide else "partial-hybrid-mesa" if mesa else "partial-softmax-7"
    near = preset(like)
    per_layer = MEASURED[like] / len(near.model.blocks) * max(1.0, work(config) / work(near))
    return per_layer * len(blocks) * (1.0 if blocks[0].mlp is None else WITH_MLP)


def makespan(pieces: list[float], gpus: int) -> float:
    """Hours until all are done, the longest first, each on the GPU that is free first."""
    free = [0.0] * gpus
    for hours in sorted(pieces, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + hours)
    return max(free)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--start-seconds", type=float, default=60.0, help="to start and compile a piece")
    given = parser.parse_args()
    groups = -(-given.seeds // AT_ONCE)
    hours = {
        name: (preset(name).train.steps * milliseconds(name) / 1000 + given.start_seconds) / 3600
        for name in PRESETS
    }
    print("| preset | steps | ms per step of five seeds | GPU-hours for all seeds |\n|---|--:|--:|--:|")
    for name, each in sorted(hours.items(), key=lambda item: -item[1]):
        told = f"{milliseconds(name):.2f}" + ("" if name in MEASURED else " (reckoned)")
        print(f"| {name} | {preset(name).train.steps:,} | {told} | {groups * each:.2f} |")
    pieces = [each for each in hours.values() for _ in range(groups)]
    total, longest = sum(pieces), max(pieces)
    print(
        f"\n{len(pieces):,} pieces of {AT_ONCE} seeds, {total:.1f} GPU-hours; the longest {longest:.2f} hours.\n"
    )
    print("| GPUs | hours |\n|--:|--:|")
    for gpus in given.gpus:
        print(f"| {gpus} | {makespan(pieces, gpus):.2f} |")


if __name__ == "__main__":
    main()

"""What the models of the whole paper but its language models cost, for so many seeds on so many GPUs.

    python scripts/plan_sweep.py --seeds 100 --gpus 1 8 64

Times are those of `benchmarks/steps_h200.json`, five seeds at once: of steps, or of whole runs. Starting and compiling
takes at most as long as the shortest whole run; where a whole run and its steps are both known, the difference is an
estimate too. Steps of the other presets are reckoned from the measured preset of the same kind whose work is nearest,
in proportion to the work, but a layer never faster than one of that preset, and none slower than one with more work
and more layers. The analyses of the figures and the language models are not in it.
"""

import argparse
import heapq
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mesascope.models import Mesa, Softmax
from mesascope.presets import PRESETS, preset

TIMES = Path(__file__).parents[1] / "benchmarks" / "steps_h200.json"


@dataclass(frozen=True)
class Cost:
    """Of one preset.

    Attributes:
        ms: per step, of all seeds together.
        seconds: of a piece.
        how: measured or reckoned, and from what.
    """

    ms: float
    seconds: float
    how: str


def work(name: str) -> float:
    """Multiplications of a step's forward pass: projections, mixers, MLPs."""
    config = preset(name)
    model, length = config.model, config.task.length
    dim = model.model_dim or model.token_dim
    per_token = 0
    for block in model.blocks:
        inner = block.heads * block.key_dim
        per_token += 4 * dim * inner
        # Products of queries and keys, and with values; a mesa-layer's state is read and written in three passes.
        per_token += 2 * length * inner if not isinstance(block.mixer, Mesa) else 6 * block.key_dim * inner
        per_token += 0 if block.mlp is None else 2 * dim * (block.mlp.hidden or 4 * dim)
    return per_token * config.train.batch_size * length


def layers(name: str) -> int:
    return len(preset(name).model.blocks)


@cache
def kind(name: str) -> str:
    mixers = {type(block.mixer) for block in preset(name).model.blocks}
    return "mesa" if Mesa in mixers else "softmax" if Softmax in mixers else "linear"


def costs(times: dict) -> tuple[dict[str, Cost], float, dict[str, float]]:
    """Of every preset; seconds to start; and what start-up may be by the presets of which both times are known."""
    for entry in times["measured"]:
        if entry["steps"] != preset(entry["preset"]).train.steps:
            raise SystemExit(f"{TIMES.name}: {entry['preset']} has other steps now. Measure it again.")
    steps = {e["preset"]: e["ms_per_step"] for e in times["measured"] if "ms_per_step" in e}
    whole = {e["preset"]: e["seconds"] for e in times["measured"] if "seconds" in e}
    source = {e["preset"]: e["source"] for e in reversed(times["measured"])}
    start = min(whole.values())
    both = {n: whole[n] - preset(n).train.steps * steps[n] / 1000 for n in steps.keys() & whole.keys()}
    found = {}
    for name in steps | whole:
        count = preset(name).train.steps
        # Of the shortest whole runs nothing is left for the steps: nothing is reckoned from these.
        ms = steps.get(name, 1000 * (whole.get(name, start) - start) / count)
        seconds = start + count * ms / 1000
        found[name] = Cost(ms, seconds, "measured" if source[name] == "alone" else "measured, at most")
    references = [name for name, cost in found.items() if cost.ms > 0]
    for name in PRESETS.keys() - found.keys():
        same = [other for other in references if kind(other) == kind(name)]
        near = min(same, key=lambda other: abs(math.log(work(name) / work(other))))
        ms = found[near].ms * max(layers(name) / layers(near), work(name) / work(near))
        larger = [o for o in same if work(o) >= work(name) and layers(o) >= layers(name)]
        ms = min([ms, *(found[other].ms for other in larger)])
        found[name] = Cost(ms, start + preset(name).train.steps * ms / 1000, f"reckoned from {near}")
    return {name: found[name] for name in PRESETS}, start, both


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
    given = parser.parse_args()
    times = json.loads(TIMES.read_text())
    found, start, both = costs(times)
    groups = -(-given.seeds // times["seeds"])
    print("| preset | steps | ms per step of five seeds | | GPU-hours for all seeds |\n|---|--:|--:|---|--:|")
    for name, cost in sorted(found.items(), key=lambda item: -item[1].seconds):
        ms = f"{cost.ms:.2f}" if cost.ms else "in the start-up"
        hours = groups * cost.seconds / 3600
        print(f"| {name} | {preset(name).train.steps:,} | {ms} | {cost.how} | {hours:.2f} |")
    print("\n| | presets | pieces | GPU-hours |\n|---|--:|--:|--:|")
    for how in ("measured", "measured, at most", "reckoned", ""):
        of = [c.seconds for c in found.values() if (c.how == how if "measured" in how else how in c.how)]
        print(f"| {how or 'all'} | {len(of)} | {groups * len(of):,} | {groups * sum(of) / 3600:.1f} |")
    pieces = [cost.seconds / 3600 for cost in found.values() for _ in range(groups)]
    starting = len(pieces) * start / 3600
    print(f"\nThe longest piece takes {60 * max(pieces):.1f} minutes. Starting, {start:g} s a piece, is "
          f"{starting:.1f} of the hours;")  # fmt: skip
    for name, seconds in sorted(both.items()):
        more = len(pieces) * (seconds - start) / 3600
        print(f"by {name} it may be {seconds:.0f} s (two runs shared the GPU): {more:+.1f} hours.")
    print("\nNot in it: the language models, and the analyses of the figures.\n")
    print("| GPUs | hours |\n|--:|--:|")
    for gpus in given.gpus:
        print(f"| {gpus} | {makespan(pieces, gpus):.2f} |")


if __name__ == "__main__":
    main()

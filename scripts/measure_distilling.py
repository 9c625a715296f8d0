"""How many steps it takes to distil the layers of a model into linear ones: loss ratios by layer after so many.

python scripts/measure_distilling.py linearization-6 --steps 300 1500 3000 15000      # a run, or a released model

Every number of steps has its own search for learning rates, a tenth of it for each rate.
"""

import argparse
import time

import jax
import numpy as np

import mesascope
from mesascope.analysis.linearize import layer_sites, linearize
from mesascope.analysis.results import stack
from mesascope.released import weights_path
from mesascope.runs import find


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, nargs="+", default=[300, 1500, 3000])
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--runs", default="runs")
    given = parser.parse_args()
    if weights_path(given.model).exists():
        model, config = mesascope.load(given.model)
        models = stack([model])
    else:
        run = find(given.model, runs=given.runs)
        models, config = run.models(), run.config
    block = config.model.blocks[0]
    sites = layer_sites(models)
    print(f"| steps | seconds | {' | '.join(f'layer {i + 1}' for i in range(len(sites)))} | largest |")
    print("|--:" * (len(sites) + 3) + "|")
    for steps in given.steps:
        began = time.monotonic()
        found = linearize(
            models, config.examples, sites, heads=block.heads, key_dim=block.key_dim, steps=steps,
            test_sequences=given.sequences, key=jax.random.key(1),
        )  # fmt: skip
        ratio = found.swapped.mean(1) / found.loss.mean(1)[:, None]
        cells = " | ".join(f"{value:.3f}" for value in [*ratio.mean(0), np.max(ratio)])
        print(f"| {steps:,} | {time.monotonic() - began:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

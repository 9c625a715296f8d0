"""What `mesascope bench language` runs: training steps of language models, as ratios to that of the first."""

import dataclasses
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from mesascope.bench import Report, machine
from mesascope.language import LanguageConfig, LanguageTrainer, language_preset
from mesascope.language.presets import Size
from mesascope.store import with_field
from mesascope.tasks import Passages
from mesascope.tasks.text import Text

GPT2 = partial(Text, corpus="", vocabulary=50257, eos=50256)


def on_random_tokens(name: str, size: Size, changes: tuple[str, ...] = ()) -> LanguageConfig:
    """A preset that needs no text: what tokens are does not change how long a step takes."""
    config = language_preset(name, lambda length: GPT2(length=length), size)
    for assignment in changes:
        config = with_field(config, assignment)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, seeds=1))


def random_batch(config: LanguageConfig) -> Passages:
    """For one seed; every token is predicted, as in text."""
    shape = (1, config.train.batch_size, config.task.length + 1)
    tokens = np.random.default_rng(0).integers(config.model.vocabulary, size=shape, dtype=np.int32)
    here, there = tokens[..., :-1], tokens[..., 1:]
    return Passages(here, there, np.ones(here.shape, bool), np.zeros_like(here))


def step_seconds(configs: dict[str, LanguageConfig], *, repeats: int) -> dict[str, np.ndarray]:
    """Of one training step: one sample per round, rounds in turn."""
    run = {}
    for name, config in configs.items():
        trainer = LanguageTrainer(config)
        batch = jax.tree.map(jnp.asarray, random_batch(config))
        # A state that is used up cannot be kept, so each is made anew from what the last step left.
        run[name] = [trainer, batch, trainer.step(trainer.start(), jnp.full(1, -1, jnp.int32), batch)]
    samples: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(repeats):
        for name, (trainer, batch, done) in run.items():
            jax.block_until_ready(done)
            began = time.perf_counter()
            run[name][2] = jax.block_until_ready(trainer.step(done.state, done.failed, batch))
            samples[name].append(time.perf_counter() - began)
    return {name: np.array(values) for name, values in samples.items()}


def model_flops(config: LanguageConfig) -> float:
    """Of one step, by the usual account: six for each token and each parameter that is multiplied with it. What
    attention does beyond its projections is not counted."""
    models = LanguageTrainer(config).shapes.models
    size = sum(leaf.size for leaf in jax.tree.leaves(models)) - models.embed.size
    return 6.0 * size * config.train.batch_size * config.task.length


def bench_language(
    *,
    presets: tuple[str, ...],
    size: Size,
    set: tuple[str, ...] = (),
    repeats: int,
    peak_tflops: float,
    out: Path | None,
    console: Console | None = None,
) -> Report:
    """Print the table; see the command line's help."""
    console, report = console or Console(), Report(machine=machine())
    console.print(" · ".join(str(v) for v in report.machine.values()))
    configs = {name: on_random_tokens(name, size, set) for name in presets}
    seconds = step_seconds(configs, repeats=repeats)
    first = configs[presets[0]]
    title = f"one training step, {first.train.batch_size} × {first.task.length} tokens, {first.model.compute}"
    table = Table(title=title)
    for column in ("", "median ms (quartiles)", f"÷ {presets[0]}", "tokens/s", "utilization"):
        table.add_column(column, justify="right" if column else "left")
    for name, config in configs.items():
        low, median, high = np.percentile(seconds[name], (25, 50, 75))
        tokens = config.train.batch_size * config.task.length / median
        part = model_flops(config) / median / (1e12 * peak_tflops)
        # Ratios of neighbours in time, so that a machine that slows down slows both.
        ratio = float(np.median(seconds[name] / seconds[presets[0]]))
        report.speed.append(
            dict(preset=name, size=size, set=list(set), seconds=[low, median, high], ratio=ratio,
                 tokens_per_second=tokens, utilization=part)
        )  # fmt: skip
        table.add_row(name, f"{1e3 * median:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})", f"{ratio:.2f}",
                      f"{tokens:,.0f}", f"{part:.1%}")  # fmt: skip
    console.print(table)
    if out is not None:
        report.write(out)
        console.print(f"written to {out}")
    return report

"""Presets, runs and corpora as tables."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mesascope import mirror, provenance
from mesascope.language import LANGUAGE_PRESETS, LanguageConfig, LanguageModel, language_preset
from mesascope.language.training import OF
from mesascope.models import Transformer
from mesascope.presets import PRESETS, preset
from mesascope.progress import spread
from mesascope.runs import Run
from mesascope.store import StoreError
from mesascope.tasks.text import Text
from mesascope.training import Config

if TYPE_CHECKING:
    from mesascope.tasks.text import Corpus


def parameters(config: Config | LanguageConfig) -> int:
    """How many numbers one model is made of."""

    def build(key: PRNGKeyArray) -> Transformer | LanguageModel:
        if isinstance(config, LanguageConfig):
            return LanguageModel(config.model, key=key)
        return Transformer(config.model, key=key)

    shapes = jax.eval_shape(build, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def list_presets(console: Console | None = None) -> None:
    """Every preset, as run."""
    table = Table("preset", "shows", "parameters", "steps", "authors' loss", title="mesascope train PRESET")
    for column in table.columns[2:]:
        column.justify = "right"
    for name, entry in PRESETS.items():
        config = preset(name)
        reference = "" if entry.reference is None else f"{entry.reference:.3f}"
        table.add_row(name, entry.shows, f"{parameters(config):,}", f"{config.train.steps:,}", reference)
    (console or Console()).print(table)


def list_language_presets(console: Console | None = None) -> None:
    """Every kind of language model."""
    table = Table(
        "preset", "shows", "parameters", title="mesascope lm train PRESET --size paper|gpu|cpu --data DIR"
    )
    table.columns[-1].justify = "right"
    gpt2 = partial(Text, corpus="", vocabulary=50257, eos=50256)
    for name, entry in LANGUAGE_PRESETS.items():
        config = language_preset(name, lambda length: gpt2(length=length), "paper")
        table.add_row(name, entry.shows, f"{parameters(config):,}")
    (console or Console()).print(table)


def list_experiments(console: Console | None = None) -> None:
    """Every figure: what it shows, and how long it takes."""
    from mesascope import experiments
    from mesascope.experiments.lab import SCALES

    table = Table("figure", "shows", title="mesascope reproduce FIGURE --preset PRESET")
    there = [experiments.experiment(name) for name in experiments.names()]
    measured = [scale for scale in SCALES if any(scale in experiment.minutes for experiment in there)]
    for scale in measured:
        table.add_column(f"{scale}, minutes", justify="right")
    for experiment in there:
        minutes = [experiment.minutes.get(scale) for scale in measured]
        table.add_row(experiment.id, experiment.shows, *("" if m is None else f"{m:g}" for m in minutes))
    if (everything := experiments.minutes().get("all")) is not None:
        table.add_section()
        table.add_row(
            "",
            "all of these, in one process",
            *(f"{everything[s]:g}" if s in everything else "" for s in measured),
        )
    (console or Console()).print(table)


def list_runs(runs: str | Path, console: Console | None = None) -> None:
    """Every run in a directory."""
    console = console or Console()
    there = mirror.names(runs)
    if not there:
        console.print(f"no runs in {runs}", highlight=False)
        return
    table = Table("run", "seeds", "steps", "loss on fresh sequences", "made by", title=f"runs in {runs}")
    table.columns[0].overflow = "fold"  # a name that is cut off finds no run
    now = provenance.source_hash()
    for run in (Run(mirror.at(runs, name).seen(weights=False)) for name in there):
        try:
            train = run.config.train
            loss = spread(np.array(run.result["loss"])) if run.finished else "not finished"
            maker = "this source" if run.provenance["source"] == now else "other source"
            table.add_row(run.path.name, f"{train.seeds}", f"{run.step:,} of {train.steps:,}", loss, maker)
        except StoreError as error:
            table.add_row(run.path.name, "", "", escape(str(error)), "")
    console.print(table)


def show_run(run: Run, console: Console | None = None) -> None:
    """What it is, how it differs from its preset, what made it, how it went."""
    console = console or Console()
    config, made = run.config, run.provenance
    console.print(f"[bold]{escape(str(run.path))}[/]", highlight=False)
    name, variant = config.name, "as_run"
    if name.endswith("-as-written"):
        name, variant = name.removesuffix("-as-written"), "as_written"
    if name in PRESETS:
        changed = _differences(preset(name, variant), config)
        text = ", ".join(f"{path} = {value!r}" for path, value in changed.items()) or "nothing changed"
        console.print(f"preset {name} ({variant}): {escape(text)}", highlight=False)
    console.print(f"{parameters(config):,} parameters, {config.train.seeds} seeds", highlight=False)
    libraries = ", ".join(f"{k} {v}" for k, v in made["libraries"].items())
    source = f"source {made['source']}, commit {made['git'] or 'unknown'}"
    console.print(f"mesascope {made['mesascope']}, {source}", highlight=False)
    console.print(
        f"{made['device']}, {made['precision']}, Python {made['python']}, {libraries}", highlight=False
    )
    metrics = run.metrics()
    if len(metrics["step"]):
        table = Table("step", "held-out loss", "training loss since the line before")
        chosen = np.unique(np.linspace(0, len(metrics["step"]) - 1, 12).round().astype(int))
        for i in chosen:
            train = metrics["train_loss"][i]
            table.add_row(
                f"{metrics['step'][i]:,}",
                spread(metrics["eval_loss"][i]),
                "" if np.isnan(train).any() else spread(train),
            )
        console.print(table)
    if made["source"] != provenance.source_hash():
        console.print(
            f"made by other source than this ({provenance.source_hash()}); to train it anew: --fresh",
            highlight=False,
        )
    if run.finished:
        result = run.result
        loss = spread(np.array(result["loss"]))
        console.print(f"loss on {result['sequences']:,} fresh sequences: {loss}", highlight=False)
        if isinstance(config, LanguageConfig):
            show_language(result, run.timing, config, console)
        if name in PRESETS and variant == "as_run" and (reference := PRESETS[name].reference) is not None:
            console.print(f"the authors' released model: {reference:.3f}", highlight=False)
    else:
        console.print(f"not finished: step {run.step:,} of {config.train.steps:,}", highlight=False)


def show_language(
    result: dict[str, Any], timing: dict[str, float] | None, config: LanguageConfig, console: Console
) -> None:
    """What is measured of trained language models: perplexity by part, in-context score, copying heads."""
    train = config.train
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(f"perplexity {spread(np.exp(result['loss']))}, right guesses {spread(np.array(result['accuracy']))}")
    if "parts" in result:
        table = Table("part of validation", "tokens", "perplexity")
        table.columns[1].justify = "right"
        for name, part in result["parts"].items():
            table.add_row(escape(name), f"{part['tokens']:,}", spread(np.exp(part["loss"])))
        console.print(table)
    if "in_context" in result:
        early, late = result["at"]
        scaled = "" if config.task.length >= OF else f" (tokens 50 and 500 of 1024, in {config.task.length})"
        say(f"loss at token {late} minus token {early}{scaled}: {spread(np.array(result['in_context']))}")
        if "in_context_smooth" in result:
            say(f"the same of means over tokens around: {spread(np.array(result['in_context_smooth']))}")
    if "offsets" in result:
        mass = np.array(result["offsets"])[..., 1:]  # who looks at its own token copies nothing
        for seed, heads in enumerate(mass, start=train.first_seed):
            found = [f"head {h} {mass.max():.0%} on the token {1 + mass.argmax()} before"
                     for h, mass in enumerate(heads) if mass.max() >= 0.5]  # fmt: skip
            say(
                f"copying heads of the first layer (half of their attention on one earlier token), seed {seed}: "
                f"{', '.join(found) or 'none'}"
            )
    if timing is not None:
        tokens = timing["steps_per_second"] * train.batch_size * config.task.length * train.seeds
        say(f"{tokens:,.0f} tokens/s in training")


def show_corpus(corpus: "Corpus", console: Console | None = None) -> None:
    """What is in it, part by part, and what could not be read."""
    console = console or Console()
    index = corpus.index
    for split, content in index["splits"].items():
        table = Table("part", title=escape(f"{corpus.path.name}: {split}"))
        for name in ("documents", "tokens", "bytes of text", "bytes per token"):
            table.add_column(name, justify="right")
        for name, about in content["parts"].items():
            table.add_row(escape(name), *_counts(about))
        table.add_section()
        table.add_row("all", *_counts(content))
        console.print(table)
    size = sum(shard["bytes"] for content in index["splits"].values() for shard in content["shards"])
    vocabulary = f"{index['tokenizer']['size']:,} tokens, one of them at the beginning of every document"
    console.print(f"{corpus.path}: {size:,} bytes", markup=False, highlight=False, soft_wrap=True)
    console.print(f"vocabulary: {vocabulary}", highlight=False)
    for split, content in index["splits"].items():
        for problem, about in content["problems"].items():
            where = ", ".join(about["where"][:5]) + (", …" if about["count"] > 5 else "")
            console.print(
                f"{split}: {escape(problem)}: {about['count']:,} ({escape(where)})",
                style="yellow", highlight=False, soft_wrap=True,
            )  # fmt: skip
    if index["ignored"]:
        ignored = ", ".join(index["ignored"][:5]) + (", …" if len(index["ignored"]) > 5 else "")
        text = f"not text, left out: {len(index['ignored']):,} files ({escape(ignored)})"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)


def _counts(about: dict[str, Any]) -> list[str]:
    documents, tokens, text = (about[name] for name in ("documents", "tokens", "text_bytes"))
    return [f"{documents:,}", f"{tokens:,}", f"{text:,}", f"{text / tokens:.2f}" if tokens else ""]


def _differences(before: Any, after: Any, path: str = "") -> dict[str, Any]:
    if dataclasses.is_dataclass(before) and type(before) is type(after):
        found: dict[str, Any] = {}
        for field in dataclasses.fields(before):
            where = f"{path}.{field.name}" if path else field.name
            found |= _differences(getattr(before, field.name), getattr(after, field.name), where)
        return found
    return {} if before == after else {path: after}

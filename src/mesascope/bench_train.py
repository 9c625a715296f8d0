"""What `mesascope bench train` runs: training steps per second, one seed and several, and PyTorch's beside them."""

import dataclasses
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array
from rich.console import Console
from rich.table import Table

from mesascope import store
from mesascope.bench import Report, machine
from mesascope.models import Transformer
from mesascope.parts import positions
from mesascope.presets import preset
from mesascope.runs import fit
from mesascope.training import (
    Config,
    Constant,
    Trainer,
    half_squared_errors,
    over_the_cores,
    with_train,
)


def step_milliseconds(configs: dict[str, Config], *, repeats: int) -> dict[str, np.ndarray]:
    """Milliseconds per training step, sampling included: one sample per round, rounds in turn."""
    trainers = {name: over_the_cores(config) for name, config in configs.items()}
    states = {name: trainer.start() for name, trainer in trainers.items()}
    count: dict[str, int] = {}
    for name, trainer in trainers.items():
        states[name] = jax.block_until_ready(trainer.advance(states[name], 1).state)
        began = time.perf_counter()
        states[name] = jax.block_until_ready(trainer.advance(states[name], 2).state)
        # About half a second per sample.
        count[name] = max(1, int(1.0 / (time.perf_counter() - began)))
    samples: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(repeats):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            states[name] = jax.block_until_ready(trainer.advance(states[name], count[name]).state)
            samples[name].append(1e3 * (time.perf_counter() - began) / count[name])
    return {name: np.array(values) for name, values in samples.items()}


def flops_per_step(config: Config) -> float:
    """Of the model's matrix products, forward and backward; without sampling and optimizer.

    As a CPU makes them, whatever the device is: what a kernel does is written down once for all of its programs.
    """
    with _as_on_a_cpu():
        return _flops_per_step(config)


@contextmanager
def _as_on_a_cpu() -> Iterator[None]:
    """What is traced meanwhile takes no kernels, and chunks as on a CPU."""
    real, jax.default_backend = jax.default_backend, lambda: "cpu"
    try:
        yield
    finally:
        jax.default_backend = real


def _flops_per_step(config: Config) -> float:
    trainer = Trainer(config)

    def gradient(models: Transformer, tokens: Array, targets: Array) -> Transformer:
        loss = lambda model: jnp.mean(half_squared_errors(model(tokens), targets))  # noqa: E731
        return jax.vmap(jax.grad(loss))(models)

    batch = jax.eval_shape(lambda: config.examples(jax.random.key(0), config.train.batch_size))
    jaxpr = jax.make_jaxpr(gradient)(trainer.shapes.models, batch.tokens, batch.targets).jaxpr
    # Without what nobody reads, such as gradients with respect to tokens: XLA leaves it out too.
    return _matrix_flops(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _matrix_flops(jaxpr: Any) -> float:
    """Two for every product of entries, loops counted as often as they run. (XLA's own account counts them once.)"""
    total = 0.0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                total += times * _matrix_flops(getattr(inner, "jaxpr", inner))
    return total


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def host_share(config: Config) -> float:
    """Which part of a run's time the device waits for the host, by the run's own account."""
    with tempfile.TemporaryDirectory() as directory:
        return fit(config, runs=directory).timing["host_share"]


# PyTorch.


def has_twin(config: Config) -> bool:
    """Whether `torch_step` knows everything that this model is made of."""
    spec = config.model
    plain = all(
        block.is_plain and (block.mlp is None or block.mlp.activation != "relu") for block in spec.blocks
    )
    return plain and not spec.masked and (spec.positions is None or spec.positions.at != "tokens")


def torch_step(
    model: Transformer, config: Config, tokens: np.ndarray, targets: np.ndarray
) -> Callable[[], float]:
    """The same model with the same weights, and the same step, written as one writes it in eager PyTorch.

    Returns:
        A function that makes one step and returns the loss before it.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    if not has_twin(config):
        raise ValueError("torch_step: plain softmax models only.")
    spec, optimizer = config.model, config.train.optimizer
    # Both in the same precision.
    torch.backends.cuda.matmul.allow_tf32 = spec.tf32

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"

    def tensor(array: Array) -> Any:
        return torch.tensor(np.asarray(array), requires_grad=True, device=device)

    weights = jax.tree.map(tensor, model)
    parameters = [leaf for leaf in jax.tree.leaves(weights) if isinstance(leaf, torch.Tensor)]
    adam = torch.optim.AdamW(
        parameters, lr=float(optimizer.rate.peak), betas=(optimizer.b1, optimizer.b2), eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )  # fmt: skip
    x_all, y_all = torch.tensor(tokens, device=device), torch.tensor(targets, device=device)
    codes = None
    if spec.positions is not None:
        codes = torch.tensor(np.asarray(positions(tokens.shape[1], spec.positions.dim)), device=device)
        codes = codes.expand(len(tokens), *codes.shape)

    def norm(x: Any, scale: Any) -> Any:
        return x if scale is None else functional.layer_norm(x, x.shape[-1:], scale, eps=1e-5)

    def forward(x: Any) -> Any:
        x = x if weights.embed is None else x @ weights.embed
        for i, (layer, block) in enumerate(zip(weights.layers, spec.blocks, strict=True)):
            y = norm(x, layer.mixer_norm)
            place = spec.positions.at if spec.positions is not None and i == 0 else None
            key_input = torch.cat([y, codes], -1) if place == "key_inputs" else y
            q, k, v = (
                a.unflatten(-1, (block.heads, -1)).transpose(1, 2)
                for a in (key_input @ layer.queries, key_input @ layer.keys, y @ layer.values)
            )
            if place == "keys":
                assert codes is not None
                wide = codes[:, None].expand(-1, block.heads, -1, -1)
                q, k = torch.cat([q, wide], -1), torch.cat([k, wide], -1)
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + heads.transpose(1, 2).flatten(-2) @ layer.output
            if block.mlp is not None:
                hidden = norm(x, layer.mlp_norm) @ layer.mlp_in
                how = "tanh" if block.mlp.activation == "gelu_tanh" else "none"
                x = x + functional.gelu(hidden, approximate=how) @ layer.mlp_out
            x = x if spec.clip is None else x.clip(-spec.clip, spec.clip)
        x = norm(x, weights.final_norm)
        return x if weights.unembed is None else x @ weights.unembed

    def step() -> float:
        adam.zero_grad()
        loss = 0.5 * ((forward(x_all)[..., : y_all.shape[-1]] - y_all) ** 2).sum(-1).mean()
        loss.backward()
        if optimizer.clip is not None:
            if optimizer.clip_by == "entry":
                torch.nn.utils.clip_grad_value_(parameters, optimizer.clip)
            else:
                torch.nn.utils.clip_grad_norm_(parameters, optimizer.clip)
        adam.step()
        return loss.item()

    return step


def our_step(
    model: Transformer, config: Config, tokens: np.ndarray, targets: np.ndarray
) -> Callable[[], float]:
    """Like `torch_step`, ours: one model, one given batch."""
    trainer = over_the_cores(config)
    batch = config.examples(jax.random.key(0), len(tokens))
    batch = batch._replace(tokens=jnp.asarray(tokens), targets=jnp.asarray(targets))
    batch = jax.tree.map(lambda a: jnp.asarray(a)[None], batch)
    step = jax.jit(trainer.step)
    state: Any = trainer.place(trainer.start()._replace(models=jax.tree.map(lambda leaf: leaf[None], model)))

    def one() -> float:
        nonlocal state
        models, rest, loss = step(state.models, state.optimizer, batch)
        state = state._replace(models=models, optimizer=rest)
        return float(loss[0])

    return one


def against_torch(config: Config, *, repeats: int) -> dict[str, Any]:
    """Milliseconds per step of both, in turn, and how far their first two losses are apart."""
    constant = dataclasses.replace(
        config.train.optimizer, rate=Constant(peak=config.train.optimizer.rate.peak)
    )
    config = with_train(config, seeds=1, optimizer=constant)
    model = jax.tree.map(lambda leaf: leaf[0], Trainer(config).start().models)
    batch = config.examples(jax.random.key(0), config.train.batch_size)
    arguments = (model, config, np.asarray(batch.tokens), np.asarray(batch.targets))
    steps = {"ours": our_step(*arguments), "torch": torch_step(*arguments)}
    losses = {name: [step(), step()] for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            step()
            samples[name].append(5e2 * (time.perf_counter() - began))
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    if apart > 1e-4:
        raise RuntimeError(f"PyTorch's model is not ours: losses of the first two steps {losses}.")
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    return medians | {"ratio": medians["ours"] / medians["torch"], "losses_apart": apart}


def bench_train(
    *,
    presets: tuple[str, ...],
    variant: str,
    seeds: int,
    set: Sequence[str] = (),
    repeats: int,
    out: Path | None,
) -> Report:
    """Print the table; see the command line's help."""
    console, report = Console(), Report(machine=machine())
    console.print(" · ".join(str(v) for v in report.machine.values()))
    told = ", ".join((variant, *set))
    table = Table(title=f"one training step, {told}, median ms (quartiles)")
    columns = (
        "",
        "one seed",
        f"{seeds} seeds",
        "ratio",
        "steps/s",
        "model GFLOP/s",
        "host waits",
        "PyTorch",
        "ours ÷",
    )
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    torch_here = importlib.util.find_spec("torch") is not None
    for name in presets:
        config = store.with_field(preset(name, variant), *set)  # pyright: ignore[reportArgumentType]
        many = with_train(config, seeds=seeds)
        with console.status(name):
            measured = step_milliseconds({"one": with_train(config, seeds=1), "many": many}, repeats=repeats)
            one, several = (np.percentile(measured[n], (50, 25, 75)) for n in ("one", "many"))
            flops = flops_per_step(many)
            # A short run: enough chunks for the share to settle, an evaluation among them.
            enough = max(2, int(15e3 / several[0]))
            share = host_share(
                with_train(many, steps=enough, eval_every=max(1, enough // 3), final_sequences=256)
            )
            row: dict[str, Any] = dict(
                preset=name, variant=variant, set=list(set), seeds=seeds,
                one_seed=one.tolist(), seeds_together=several.tolist(),
                ratio=several[0] / one[0], flops=flops, host_share=share,
            )  # fmt: skip
            if torch_here and has_twin(config):
                row["torch"] = against_torch(config, repeats=repeats)
        report.speed.append(row)
        theirs = row.get("torch")
        table.add_row(
            name, *(f"{t[0]:.2f} ({t[1]:.2f} to {t[2]:.2f})" for t in (one, several)), f"{row['ratio']:.2f}",
            f"{1e3 / several[0]:.3g}", f"{flops / several[0] / 1e6:.3g}", f"{100 * share:.1f}%",
            f"{theirs['torch']:.2f}" if theirs else "", f"{theirs['ratio']:.2f}" if theirs else "",
        )  # fmt: skip
    console.print(table)
    if not torch_here:
        console.print("PyTorch is not installed: nothing to compare with.")
    if out is not None:
        report.write(out)
        console.print(f"written to {out}")
    return report

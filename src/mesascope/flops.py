"""What a training step costs, counted in its matrix products."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array

from mesascope.models import Transformer
from mesascope.training import Config, Trainer, half_squared_errors


def flops_per_step(config: Config) -> float:
    """Of the model's matrix products, forward and backward; without sampling and optimizer."""
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

"""A Transformer that solves least squares in its forward pass, with weights written by hand.

Every sequence follows its own random rotation, s_{t+1} = W s_t + noise, and nobody tells the model W. Its tokens are
the observations. The first layer, softmax attention, copies the previous observation into each token: that makes pairs
(s_{t-1}, s_t), a training set. Each further layer, linear attention, is one step of an iteration that brings x_t closer
to H⁻¹ s_t, where H is the regularized Gram matrix of the inputs so far. The last layer is one step of gradient descent
with x_t as query: for x_t = H⁻¹ s_t its prediction is that of least squares, exactly.

No weight is trained. The plot shows what the last layer would predict from the x_t of each layer before it, and it ends
at the error of least squares, which `mesa_attention` computes in one layer.

    python examples/theory_as_weights.py                 # in the terminal
    python examples/theory_as_weights.py by_layer.png    # and as a figure (needs matplotlib)
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from mesascope.tasks import Dynamics
from mesascope.theory.constructions import copying_then_proposition_2
from mesascope.theory.solvers import GradientStep, Ridge, autoregressive, chebyshev_coefficients, loss

DIM, TIME, STEPS, LAM = 4, 16, 20, 2.0


def main(figure: str | None = None) -> tuple[list[float], float, float]:
    """Build it, run it, plot errors by layer. Returns them, that of least squares, and the largest difference to it."""
    task = Dynamics.linear(state_dim=DIM, length=TIME)
    context = autoregressive(task.sample(jax.random.key(0), 256).observations)
    observations = context.queries

    # The spectra of all H lie between these; Chebyshev coefficients suit everything in between.
    gram = np.einsum("bti,btj->bij", observations, observations)
    low, high = 1 / LAM, float(np.linalg.eigvalsh(gram).max()) + 1 / LAM
    eta = 2 / (low + high)
    alphas, betas = chebyshev_coefficients(eta * low, eta * high, STEPS)
    built = copying_then_proposition_2(DIM, 1, STEPS, alphas, betas, LAM, eta, sharpness=20.0)

    x_by_layer = jax.jit(lambda s: built.stream(s, "solution"))(observations)[1:-1]
    last_layer = jax.jit(lambda x: loss(GradientStep(eta), context._replace(queries=x)))
    errors = [float(last_layer(x)) for x in x_by_layer]
    least_squares = jax.jit(lambda context: Ridge(LAM)(context))(context)
    exact = float(loss(lambda _: least_squares, context))
    difference = float(jnp.max(jnp.abs(jax.jit(lambda s: built(s))(observations) - least_squares)))

    weights = sum(leaf.size for leaf in jax.tree.leaves(built.model))
    print(f"{len(built.model.layers)} layers, {weights} weights, none of them trained.")
    print("Error of the next observation, ½‖·‖², from what layer l has computed:\n")
    for layer, error in enumerate(errors, start=1):
        print(f"  layer {layer:2d}  {'█' * round(60 * error / max(errors))} {error:.4f}")
    print(f"  exact     {'░' * round(60 * exact / max(errors))} {exact:.4f}  (least squares)")
    if figure is not None:
        draw(errors, exact, figure)
    return errors, exact, difference


def draw(errors: list[float], exact: float, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(errors) + 1), errors, "o-", label="from what layer l has computed")
    axes.axhline(exact, color="black", linestyle="--", label="least squares")
    axes.set_xticks(range(1, len(errors) + 1, 4))
    axes.set_xlabel("layer l")
    axes.set_ylabel("error of the next observation, ½‖·‖²")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:2])

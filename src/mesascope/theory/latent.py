r"""Partially observed linear systems: what the last k observations tell of the next.

$$h_{t+1} = W^* h_t + \epsilon_{h,t}, \qquad s_t = C^* h_t + \epsilon_{s,t}, \qquad
  z_t^k = [s_t, s_{t-1}, \dots, s_{t-k+1}]$$

Observations are stacked newest first, as `tasks.Stacked` does. The paper lists them oldest first: its matrices are
these with the blocks in reverse order.

`System` knows $W^*$ and $C^*$, and has the linear maps from $z_t^k$ that are optimal for that one system. An in-context
learner knows neither: see `theory.encoders`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mesascope.ops.factor import matmul, transpose
from mesascope.tasks.dynamics import matvec


class System(NamedTuple):
    r"""One linear system: $W^*$, $C^*$, and the standard deviations of $\epsilon_h$ and $\epsilon_s$.

    Methods are for one system; batches of systems are `jax.vmap`.
    """

    transition: Float[Array, "state state"]
    readout: Float[Array, "obs state"]
    state_noise: float | Float[Array, ""] = 0.0
    observation_noise: float | Float[Array, ""] = 0.0

    def observability(self, k: int) -> Float[Array, "stack state"]:
        r"""$\mathcal O_k$, for which without noise $z_t^k = \mathcal O_k h_{t-k+1}$.

        $$\mathcal O_k = \begin{bmatrix} C^*W^{*\,k-1} \\ \vdots \\ C^*W^* \\ C^* \end{bmatrix}$$
        """
        return jnp.concatenate(self._readouts(k, self.transition)[::-1])

    def minimum_norm_map(self, k: int) -> Float[Array, "stack stack"]:
        r"""$\Phi_k = \mathcal O_k W^* \mathcal O_k^\dagger$, the smallest map with $z_{t+1}^k = \Phi_k z_t^k$.

        Such a map has to satisfy $\Phi_k\mathcal O_k = \mathcal O_k W^*$. If $\mathcal O_k$ has rank $n_h$ (which
        takes $k n_s \ge n_h$) there are solutions, and this is the one of least norm. Otherwise there is none in
        general: the newest block of this map is off by $C^*W^{*\,k}(I - \mathcal O_k^\dagger\mathcal O_k)$.
        """
        observability = self.observability(k)
        return matmul(matmul(observability, self.transition), jnp.linalg.pinv(observability))

    def lagrangian(self, k: int) -> Float[Array, "unknown unknown"]:
        r"""S, the stationarity conditions of the most likely state and noises behind $z_t^k$.

        With $v$ the k observation noises, the dynamics run backwards give

        $$z_t^k = v + \mathcal F_k h_t - \sum_{l=1}^{k-1}\mathcal F_k^l\,\epsilon_{h,t-l}, \qquad
          \mathcal F_k = \begin{bmatrix} C^* \\ C^*W^{*-1} \\ \vdots \\ C^*W^{*-(k-1)} \end{bmatrix}, \qquad
          \mathcal F_k^l = \begin{bmatrix} 0_{l \text{ blocks}} \\ C^*W^{*-1} \\ \vdots \\ C^*W^{*-(k-l)}
          \end{bmatrix}$$

        and minimizing $\lVert v\rVert^2/2\sigma_s^2 + \sum_l\lVert\epsilon_{h,t-l}\rVert^2/2\sigma_h^2$ under that
        constraint, with multipliers $\mu$, is the linear system

        $$\begin{aligned}
          \mathcal F_k^\top\mu &= 0 & \epsilon_{h,t-l} - \sigma_h^2\,\mathcal F_k^{l\,\top}\mu &= 0 \\
          v + \sigma_s^2\,\mu &= 0 & v + \mathcal F_k h_t - \textstyle\sum_l \mathcal F_k^l\,\epsilon_{h,t-l} &= z_t^k
          \end{aligned}$$

        of $k n_h + 2 k n_s$ equations: S times $[h_t, \epsilon_{h,t-1}, \dots, \epsilon_{h,t-k+1}, v, \mu]$ is
        $[0, \dots, 0, z_t^k]$.

        The paper takes both variances equal, and then they drop out. It describes $\mathcal F_k^l$ as
        $\mathcal F_k$ shifted by l blocks, which would begin with $C^*$; its displayed matrices begin with
        $C^*W^{*-1}$, and these are right (for orthogonal $W^*$ both lead to the same $h_t$). Its sum over l has
        $\epsilon_{h,t-1}$ for $\epsilon_{h,t-l}$.
        """
        n, m = self.transition.shape[0], k * self.readout.shape[0]
        dtype = self.transition.dtype
        inverse = jnp.linalg.inv(self.transition)
        blocks = self._readouts(k, inverse)
        shifted = jnp.concatenate(self._readouts(k, inverse, first=inverse))
        F = jnp.concatenate(blocks)
        # ε_{h,t-l} does not touch the l newest observations.
        F_noise = jnp.concatenate([_pushed_down(shifted, l, m // k) for l in range(1, k)] or [F[:, :0]], 1)
        noises = F_noise.shape[1]

        def zeros(rows: int, columns: int) -> Array:
            return jnp.zeros((rows, columns), dtype)

        def eye(size: int) -> Array:
            return jnp.eye(size, dtype=dtype)

        state_variance = jnp.asarray(self.state_noise, dtype) ** 2
        observation_variance = jnp.asarray(self.observation_noise, dtype) ** 2
        return jnp.block([
            [zeros(n, n), zeros(n, noises), zeros(n, m), F.T],
            [zeros(noises, n), eye(noises), zeros(noises, m), -state_variance * F_noise.T],
            [zeros(m, n), zeros(m, noises), eye(m), observation_variance * eye(m)],
            [F, -F_noise, eye(m), zeros(m, m)],
        ])  # fmt: skip

    def state_map(self, k: int) -> Float[Array, "state stack"]:
        r"""U, the map to the maximum-likelihood estimate of the state, $\hat h_t = U z_t^k$.

        It is the upper right block of $S^{-1}$ (in the paper's numbering of blocks from 0 the block $[0, k+1]$;
        it writes $[0, k+2]$). Nothing is assumed about $h_{t-k+1}$, so this is generalized least squares, and the
        filtered state of a Kalman filter that starts with a diffuse prior k observations ago.

        S must be invertible: $\mathcal O_k$ of rank $n_h$, $W^*$ invertible, and observation noise (or
        $k n_s = n_h$).

        Raises:
            ValueError: $k n_s < n_h$: so few numbers fit infinitely many states.
        """
        obs_dim, state_dim = self.readout.shape
        if k * obs_dim < state_dim:
            raise ValueError(
                f"k: {k} observations of {obs_dim} numbers do not determine a state of {state_dim}; "
                f"expected at least {-(-state_dim // obs_dim)}."
            )
        S = self.lagrangian(k)
        m = k * obs_dim
        right = jnp.concatenate([jnp.zeros((S.shape[0] - m, m), S.dtype), jnp.eye(m, dtype=S.dtype)])
        return jnp.linalg.solve(S, right)[:state_dim]

    def next_map(self, k: int) -> Float[Array, "obs stack"]:
        r"""$C^* W^* U$: the prediction $\hat s_{t+1} = C^* W^* \hat h_t$ as a map of $z_t^k$."""
        return matmul(matmul(self.readout, self.transition), self.state_map(k))

    def companion(self, k: int) -> Float[Array, "stack stack"]:
        r"""$\Phi$ with $\hat z_{t+1}^k = \Phi z_t^k$: the newest block is predicted, the others move on.

        $$\Phi = \begin{bmatrix} C^*W^*U \\ [\,I_{(k-1)n_s} \;\; 0\,] \end{bmatrix}$$
        """
        prediction = self.next_map(k)
        obs_dim, m = prediction.shape
        return jnp.concatenate([prediction, jnp.eye(m, dtype=prediction.dtype)[: m - obs_dim]])

    def regression_map(
        self, k: int, state_covariance: Float[Array, "state state"]
    ) -> Float[Array, "obs stack"]:
        r"""What least squares of $s_{t+1}$ on $z_t^k$ converges to: the best linear prediction.

        $$\mathbb E[s_{t+1} z_t^{k\top}]\;\mathbb E[z_t^k z_t^{k\top}]^{-1}$$

        This is not quite $C^*W^*U$, though the paper equates the two: regression knows from the data how large
        states are, and maximum likelihood does not. The difference vanishes like noise over
        `state_covariance`; with orthogonal $W^*$, where noise makes states grow forever, it vanishes in long
        sequences. Unlike $C^*W^*U$ this exists for every k.

        Args:
            state_covariance: $\mathbb E[h_{t-k+1}h_{t-k+1}^\top]$, of the state behind the oldest observation.
        """
        stack, cross, _ = self._moments(k, state_covariance)
        return transpose(jnp.linalg.solve(stack, transpose(cross)))

    def regression_loss(
        self, encoder: Float[Array, "code stack"], state_covariance: Float[Array, "state state"]
    ) -> Float[Array, ""]:
        r"""Loss of least squares of $s_{t+1}$ on $u_t = E z_t^k$ after infinitely many pairs.

        $$\tfrac12\min_\Phi\,\mathbb E\lVert s_{t+1} - \Phi E z_t^k\rVert^2$$

        The paper would have E minimize the distance between the predictions from $E z_t^k$ and from all that was
        seen. The best prediction's error is orthogonal to everything it was made of, so that distance, squared and
        in expectation, is the difference of two such losses: of E, and of the identity. Minimizing either is the same.

        (Maximum likelihood proper, which assumes nothing about states, has no prediction at all from fewer than $n_h$
        numbers. Hence the covariance.)

        Args:
            encoder: E, of full row rank. The identity of size $k n_s$ gives the loss of `regression_map`.
            state_covariance: of $h_{t-k+1}$.
        """
        n_s = self.readout.shape[0]
        stack, cross, last = self._moments(encoder.shape[1] // n_s, state_covariance)
        seen = matmul(encoder, cross.T)
        kept = matmul(seen.T, jnp.linalg.solve(matmul(matmul(encoder, stack), encoder.T), seen))
        dtype = self.transition.dtype
        noise = jnp.asarray(self.state_noise, dtype) ** 2 * jnp.sum(self.readout**2)
        noise = noise + jnp.asarray(self.observation_noise, dtype) ** 2 * n_s
        return 0.5 * (jnp.trace(last) - jnp.trace(kept) + noise)

    def kalman_predictions(
        self, observations: Float[Array, "time obs"], state_covariance: Float[Array, "state state"]
    ) -> Float[Array, "time obs"]:
        r"""$\mathbb E[s_{t+1} \mid s_1 \dots s_t]$ at every t: the loss nobody can beat, if states are Gaussian.

        Args:
            observations: $s_1 \dots s_T$, without the last target.
            state_covariance: of $h_1$, whose mean is 0. If $h_1$ is not Gaussian, this is the best linear prediction.
        """
        W, C = self.transition, self.readout
        dtype = observations.dtype
        state_variance = jnp.asarray(self.state_noise, dtype) ** 2
        observation_variance = jnp.asarray(self.observation_noise, dtype) ** 2

        # The noises of one observation's entries are independent, so entries can be taken in one by one, which needs
        # no matrix inverse.
        def absorb(
            belief: tuple[Array, Array], entry: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], None]:
            (mean, P), (c, s) = belief, entry
            Pc = matvec(P, c)
            gain = Pc / (jnp.dot(c, Pc) + observation_variance)
            mean = mean + gain * (s - jnp.dot(c, mean))
            kept = jnp.eye(len(c), dtype=dtype) - jnp.outer(gain, c)
            # Joseph's form: symmetric and positive definite whatever the rounding.
            P = matmul(matmul(kept, P), kept.T) + observation_variance * jnp.outer(gain, gain)
            return (mean, P), None

        def step(belief: tuple[Array, Array], s: Array) -> tuple[tuple[Array, Array], Array]:
            (mean, P), _ = jax.lax.scan(absorb, belief, (C, s))
            mean = matvec(W, mean)
            P = matmul(matmul(W, P), W.T) + state_variance * jnp.eye(len(W), dtype=dtype)
            return (mean, P), matvec(C, mean)

        start = (jnp.zeros(len(W), dtype), state_covariance.astype(dtype))
        return jax.lax.scan(step, start, observations)[1]

    def _readouts(self, count: int, step: Array, *, first: Array | None = None) -> list[Array]:
        """C, C step, C step², … `count` of them, or from C first on."""
        blocks = [self.readout if first is None else matmul(self.readout, first)]
        for _ in range(count - 1):
            blocks.append(matmul(blocks[-1], step))
        return blocks

    def _moments(self, k: int, state_covariance: Array) -> tuple[Array, Array, Array]:
        r"""Second moments of $z_t^k$ with itself, of $s_{t+1}$ with $z_t^k$, and of $C^*W^*h_t$ with itself."""
        dtype = self.transition.dtype
        n_s = self.readout.shape[0]
        # Of k+1 observations, s_{t+1} and those of z: everything is linear in the first state and k noises.
        stack = self.observability(k + 1)
        second = matmul(matmul(stack, state_covariance.astype(dtype)), stack.T)
        for l in range(1, k):
            late = _pushed_up(stack, l, n_s)
            second = second + jnp.asarray(self.state_noise, dtype) ** 2 * matmul(late, late.T)
        noise = jnp.asarray(self.observation_noise, dtype) ** 2 * jnp.eye(k * n_s, dtype=dtype)
        return second[n_s:, n_s:] + noise, second[:n_s, n_s:], second[:n_s, :n_s]


def _pushed_down(stack: Array, blocks: int, width: int) -> Array:
    """Blocks of zeros above; as many are lost below."""
    return jnp.pad(stack, ((blocks * width, 0), (0, 0)))[: stack.shape[0]]


def _pushed_up(stack: Array, blocks: int, width: int) -> Array:
    """Blocks of zeros below; as many are lost above."""
    return jnp.pad(stack, ((0, blocks * width), (0, 0)))[blocks * width :]

"""The in-context algorithms in plain numpy, one sequence and one time step at a time. They share no code with ours."""

import numpy as np


def pairs_before(observations, t, features=None, newest_pair=True):
    """Inputs and targets known after s_1 … s_t (t counts from 1), oldest first."""
    s = np.asarray(observations, np.float64)
    x = s if features is None else np.asarray(features, np.float64)
    last = t - 1 if newest_pair else t - 2
    return x[: max(last, 0)], s[1 : max(last, 0) + 1]


def at_every_step(predict, observations, features=None, newest_pair=True):
    """predict(inputs, targets, query) for every sequence and every t."""
    s = np.asarray(observations, np.float64)
    out = np.zeros((s.shape[0], s.shape[1] - 1, s.shape[2]))
    for i in range(s.shape[0]):
        x = s[i] if features is None else np.asarray(features[i], np.float64)
        for t in range(1, s.shape[1]):
            inputs, targets = pairs_before(s[i], t, x, newest_pair)
            out[i, t - 1] = predict(inputs, targets, x[t - 1])
    return out


def ridge(lam):
    def predict(x, y, query):
        # As an ordinary least-squares problem with the penalty as extra rows: no normal equations.
        rows = np.concatenate([x, np.eye(len(query)) / np.sqrt(lam)])
        labels = np.concatenate([y, np.zeros((len(query), y.shape[1]))])
        return query @ np.linalg.lstsq(rows, labels, rcond=None)[0]

    return predict


def gradient_descent(etas, phi_0):
    def predict(x, y, query):
        phi = np.array(phi_0, np.float64)
        for eta in etas:
            phi = phi - eta * sum((np.outer(phi @ a - b, a) for a, b in zip(x, y, strict=True)), 0 * phi)
        return phi @ query

    return predict


def newton_schulz(lam, steps):
    def predict(x, y, query):
        h = x.T @ x + np.eye(len(query)) / lam
        inverse = np.eye(len(query)) / np.trace(h)
        for _ in range(steps):
            inverse = inverse @ (2 * np.eye(len(query)) - h @ inverse)
        return y.T @ x @ inverse @ query

    return predict


def learned_iteration(alphas, betas, lam):
    """As the released code runs it: matrices X and T, the system divided by its Frobenius norm."""

    def predict(x, y, query):
        h = x.T @ x + np.eye(len(query)) / lam
        size = np.sqrt((h**2).sum())
        eye = np.eye(len(query))
        X = T = X_old = eye
        for alpha, beta in zip(alphas, betas, strict=True):
            T = T @ (eye - alpha * h / size)
            X, X_old = X + T + beta * (X - X_old), X
        return y.T @ x @ (X / size) @ query

    return predict


def richardson(alphas, betas, lam, eta):
    def predict(x, y, query):
        h = eta * (x.T @ x + np.eye(len(query)) / lam)
        now = before = query
        for alpha, beta in zip(alphas, betas, strict=True):
            now, before = now + alpha * (query - h @ now) + beta * (now - before), now
        return eta * y.T @ x @ now

    return predict


def kernel_regression(beta):
    def predict(x, y, query):
        if not len(x):
            return np.zeros(y.shape[1])
        weights = np.exp(beta * (x @ query) - (beta * (x @ query)).max())
        return weights @ y / weights.sum()

    return predict


def nearest_neighbor(x, y, query):
    return y[np.argmax(x @ query)] if len(x) else np.zeros(y.shape[1])


def stacked_gradient_steps(observations, etas):
    """Layer by layer over whole sequences: residuals of token i as fitted to the tokens up to i."""
    s = np.asarray(observations, np.float64)
    out = []
    for sequence in s:
        now = sequence[:-1]
        past = np.concatenate([0 * now[:1], now[:-1]])
        prediction, residual = 0 * now, now.copy()
        for eta in etas:
            phis = np.cumsum(np.einsum("ti,tj->tij", residual, past), 0)
            prediction = prediction + eta * np.einsum("tij,tj->ti", phis, now)
            residual = residual - eta * np.einsum("tij,tj->ti", phis, past)
        out.append(prediction)
    return np.stack(out)


def best_polynomial(observations, degree, lam, newest_pair=True, normalized=True):
    """The least loss of B q(M) x / F over all polynomials q of a degree: linear least squares for its coefficients."""
    s = np.asarray(observations, np.float64)
    x, y = s[:, :-1], s[:, 1:]
    late = 1 if newest_pair else 2
    n, time = x.shape[2], x.shape[1]
    keys, values = np.zeros_like(x), np.zeros_like(x)
    keys[:, late:], values[:, late - 1 :] = x[:, :-late], x[:, : time - late + 1]
    a = np.cumsum(keys[..., :, None] * keys[..., None, :], 1) + np.eye(n) / lam
    b = np.cumsum(values[..., :, None] * keys[..., None, :], 1)
    size = np.linalg.norm(a, axis=(-2, -1))[..., None] if normalized else np.full((*x.shape[:2], 1), 100.0)
    columns, term = [], x / size
    for _ in range(degree + 1):
        columns.append(np.einsum("btij,btj->bti", b, term).ravel())
        term = term - 2 * np.einsum("btij,btj->bti", a, term) / size
    basis = np.stack(columns, 1)
    basis = np.linalg.qr(basis)[0]
    error = y.ravel() - basis @ (basis.T @ y.ravel())
    return 0.5 * (error**2).sum() / (len(s) * time)

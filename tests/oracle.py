"""The transducer loss by enumeration of every path, in numpy and float64: the top of the ladder of oracles.

A path takes T blanks and U labels and ends with a blank, so there are C(T - 1 + U, U) of them: keep T and U small.

    log Z        = logsumexp over paths of the sum of their arcs
    occupancy    = probability that a path drawn with weight exp(sum - log Z) takes the arc
    d logp       = -occupancy   (labels times 1 + fastemit_lambda)
    d logits     = d logp - softmax * sum over classes of d logp, then clamped

Nothing here imports torch or the package.
"""

import itertools
from typing import NamedTuple

import numpy as np

Array = np.ndarray


class Lattice(NamedTuple):
    log_z: float
    blank: Array  # [T, U1] occupancy of each blank arc
    label: Array  # [T, U] occupancy of each label arc


def lattice(logp_blank: Array, logp_label: Array) -> Lattice:
    """One utterance: logp_blank [T, U1], logp_label [T, U]."""
    frames, columns = logp_blank.shape
    labels = columns - 1
    weights, routes = [], []
    for label_steps in itertools.combinations(range(frames - 1 + labels), labels):
        t = u = 0
        route, weight = [], 0.0
        for step in range(frames - 1 + labels):
            if step in label_steps:
                weight += logp_label[t, u]
                route.append(("label", t, u))
                u += 1
            else:
                weight += logp_blank[t, u]
                route.append(("blank", t, u))
                t += 1
        weights.append(weight + logp_blank[t, u])
        routes.append([*route, ("blank", t, u)])
    best = max(weights)
    blank, label = np.zeros(logp_blank.shape), np.zeros(logp_label.shape)
    if best == -np.inf:
        return Lattice(-np.inf, blank, label)
    log_z = best + np.log(np.sum(np.exp(np.array(weights) - best)))
    for weight, route in zip(weights, routes, strict=True):
        for kind, t, u in route:
            (blank if kind == "blank" else label)[t, u] += np.exp(weight - log_z)
    return Lattice(log_z, blank, label)


def log_softmax(x: Array) -> Array:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def loss_of_logits(
    logits: Array,
    targets: Array,
    frames: Array,
    labels: Array,
    *,
    blank: int,
    normalise: bool = True,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
) -> tuple[Array, Array]:
    """Losses [B] and each one's own gradient [B, T, U1, V]: logits [B, T, U1, V], targets [B, U], lengths [B]."""
    losses, gradient = np.zeros(len(logits)), np.zeros(logits.shape)
    for b, (T, U) in enumerate(zip(frames, labels, strict=True)):
        scores = logits[b, :T, : U + 1]
        logp = log_softmax(scores) if normalise else scores
        y = targets[b, :U]
        found = lattice(logp[:, :, blank], logp[:, np.arange(U), y])
        losses[b] = -found.log_z
        d_logp = np.zeros(scores.shape)
        d_logp[:, :, blank] -= found.blank
        for u in range(U):
            d_logp[:, u, y[u]] -= found.label[:, u] * (1 + fastemit_lambda)
        d_scores = d_logp
        if normalise:
            d_scores = d_logp - np.exp(logp) * d_logp.sum(axis=-1, keepdims=True)
        if clamp > 0:
            d_scores = d_scores.clip(-clamp, clamp)
        gradient[b, :T, : U + 1] = d_scores
    return losses, gradient


ACTIVATIONS = {
    "tanh": (np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0).astype(float)),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), lambda x: np.exp(-x) / (1 + np.exp(-x)) ** 2),
}


def loss_of_joint(
    encoder: Array,
    predictor: Array,
    weight: Array,
    bias: Array | None,
    targets: Array,
    frames: Array,
    labels: Array,
    upstream: Array,
    *,
    activation: str = "tanh",
    **options: float,
) -> dict[str, Array]:
    """Losses [B] and the gradient of sum(upstream * losses) at the four inputs, by tensor name."""
    act, slope = ACTIVATIONS[activation]
    total = encoder[:, :, None] + predictor[:, None]  # [B, T, U1, H]
    hidden = act(total)
    logits = hidden @ weight.T + (0 if bias is None else bias)
    losses, d_logits = loss_of_logits(logits, targets, frames, labels, **options)
    d_logits = d_logits * upstream[:, None, None, None]
    d_total = (d_logits @ weight) * slope(total)
    results = {
        "loss": losses,
        "d_encoder": d_total.sum(axis=2),
        "d_predictor": d_total.sum(axis=1),
        "d_linear_weight": np.einsum("btuv,btuh->vh", d_logits, hidden),
    }
    if bias is not None:
        results["d_linear_bias"] = d_logits.sum(axis=(0, 1, 2))
    return results

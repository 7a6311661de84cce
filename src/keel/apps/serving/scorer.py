"""Trained router as a numpy function from features of replicas to scores, in tens of microseconds.

The network of `keel.networks.pointer` scores every replica by itself, however many there are. Here
it is three matrix products of numpy, for evaluation and for live routing; a test holds it to the
agent's own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keel.apps.serving.observations import REPLICA, REQUEST
from keel.errors import InputError
from keel.training.policy import Policy

Matrix = NDArray[np.float32]
NAMES = {
    "item": "actor.embedding.item.weight",
    "item_bias": "actor.embedding.item.bias",
    "context": "actor.embedding.context.weight",
    "second": "actor.embedding.second.weight",
    "second_bias": "actor.embedding.second.bias",
    "score": "actor.score.weight",
    "score_bias": "actor.score.bias",
}
ACTIVATIONS: dict[str, Callable[[Matrix], Matrix]] = {
    "relu": lambda x: np.maximum(x, np.float32(0.0)),
    "tanh": np.tanh,
}


@dataclass(frozen=True)
class Scorer:
    """Weights of the network that scores replicas, transposed: `[in, out]`."""

    item: Matrix
    item_bias: Matrix
    context: Matrix
    second: Matrix
    second_bias: Matrix
    score: Matrix
    score_bias: Matrix
    activation: str = "relu"

    def __call__(self, replicas: Matrix, request: Matrix) -> Matrix:
        """Return scores `[…, R]` of replicas `[…, R, F]` for a request `[…, C]`."""
        act = ACTIVATIONS[self.activation]
        context = (request @ self.context)[..., None, :]
        hidden = act(replicas @ self.item + self.item_bias + context)
        hidden = act(hidden @ self.second + self.second_bias)
        scores: Matrix = (hidden @ self.score + self.score_bias)[..., 0]
        return scores


def scorer_of(policy: Policy) -> Scorer:
    """Return the scorer of a policy that was trained on `serving`."""
    if policy.config.env != "serving":
        raise InputError(f"{policy.path}: was trained on {policy.config.env}, not on serving")
    if policy.config.network.kind != "pointer" or policy.normalizer is not None:
        raise InputError(
            f"{policy.path}: only networks of kind pointer, without normalized observations, can "
            "be taken out of a run: others know but one number of replicas"
        )
    tree = {name: x.numpy() for name, x in policy.agent.named(policy.params).items()}
    return make_scorer(tree, policy.config.network.activation)


def make_scorer(tree: Mapping[str, Matrix], activation: str) -> Scorer:
    """Make a scorer from weights by the names of the network."""
    missing = [name for name in NAMES.values() if name not in tree]
    if missing or activation not in ACTIVATIONS:
        raise InputError(f"scorer: these weights are no router's ({', '.join(missing)})")
    parts = {
        own: np.ascontiguousarray(tree[name].T if tree[name].ndim == 2 else tree[name])
        for own, name in NAMES.items()
    }
    scorer = Scorer(**parts, activation=activation)
    if scorer.item.shape[0] != len(REPLICA) or scorer.context.shape[0] != len(REQUEST):
        raise InputError("scorer: was trained on other observations than this version makes")
    return scorer


def load_scorer(run: Path, checkpoint: str | int | None = None) -> Scorer:
    """Load the scorer of a run.

    Args:
        run: Folder of a run on `serving`.
        checkpoint: "best", "last" or a step; by default the best, or the last.
    """
    from keel.training.policy import open_policy

    return scorer_of(open_policy(run, checkpoint))

"""An update over a large vocabulary never holds the logits of a whole batch."""

from __future__ import annotations

import torch
from token_toys import PROMPTS, qwen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keel.algorithms.optimizer import initial_opt_state, make_step
from keel.algorithms.ppo import PPO
from keel.distributions.vocabulary import HEAD, Vocabulary
from keel.experience.batch import Experience, Targets
from keel.experience.completions import Sampling, complete
from keel.losses.token import REFERENCE_HEAD, REFERENCE_HIDDEN, TokenObjective
from keel.networks.causal_lm import TokenAgent
from keel.trust_region.certify import Certified
from keel.types import AlgorithmState, HyperParams

WORDS, MOST = 5_000, 20_000


class LargestTensor(TorchDispatchMode):
    """Watches every operation for the size of what it makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_sampling_learning_and_certifying_stay_below_the_bound() -> None:
    agent = TokenAgent(qwen(vocab_size=WORDS, hidden_size=16))
    agent.dist = Vocabulary(WORDS, 16, max_elements=MOST)
    found = complete(
        agent,
        agent.initial,
        PROMPTS,
        Sampling(8),
        torch.Generator().manual_seed(0),
        group=4,
        eos=1,
    )
    reference = agent.policy(agent.initial, found.obs)
    batch = found.batch(**{REFERENCE_HIDDEN: reference["hidden"]})
    advantage = torch.where(torch.arange(12) % 2 == 0, 1.0, -1.0)[:, None] * batch.weight
    nothing = torch.zeros_like(advantage)
    batch = batch._replace(
        advantage=advantage,
        target=nothing,
        old_value=nothing[..., None],
        constants={HEAD: agent.head(agent.initial).clone(), REFERENCE_HEAD: reference["head"]},
    )
    objective = TokenObjective(value_coef=0.0, kl="full", max_elements=MOST)
    step = make_step(agent, objective, max_grad_norm=1.0)
    algorithm = Certified(PPO(agent, step, epochs=1, minibatch=12, objective=objective))

    def targets(params: Tensor) -> Targets:
        return Targets(batch.advantage, batch.target, batch.old_value)

    whole = int(batch.weight.sum()) * WORDS
    with LargestTensor() as largest:
        _, report = algorithm.update(
            AlgorithmState(initial_opt_state(agent.initial), torch.Generator().manual_seed(0)),
            Experience(batch, targets),
            HyperParams(kl_coef=0.1),
        )
    assert largest.elements <= agent.initial.numel() < whole / 2
    assert report.kl_exact.item() > 0.0

"""Keel on tokens; gate, certificate, KL accounting and metrics are on, as by default."""

import statistics
import string
from dataclasses import dataclass
from types import SimpleNamespace

from common import Clock, answer, job

from keel.apps.language.build import open_session
from keel.apps.language.config import from_dict
from keel.apps.language.source import PromptSource
from keel.apps.language.tasks import Example
from keel.apps.language.tokenizer import build_tokenizer
from keel.training.loop import run
from keel.training.session import Session, initial_state

CHARACTERS = string.digits + string.ascii_letters


@dataclass(frozen=True)
class Noise:
    """Random prompts, and rewards that take no time; half of the answers are better."""

    name: str
    prompt_tokens: int
    max_new_tokens: int
    alphabet: str
    stop: None = None

    def example(self, rng):
        letters = rng.integers(0, len(self.alphabet), self.prompt_tokens)
        return Example("".join(self.alphabet[i] for i in letters), "", {})

    def verify(self, example, completion):
        return float(ord(completion[:1] or "0") % 2)


class Endless(PromptSource):
    """Completions that only end when they are long enough, as the peer's do."""

    @property
    def eos(self):
        return -1


def endless(work: SimpleNamespace, language: SimpleNamespace) -> Session:
    alphabet = CHARACTERS[: language.vocabulary - 3]  # beside padding, begin and end
    config = from_dict(
        {
            "algo": "grpo",
            "seed": work.seed,
            "total_steps": (work.warmup + 2 * work.iterations) * work.num_envs,
            "threads": work.threads,
            "model": {
                "hidden": language.hidden,
                "layers": language.layers,
                "heads": language.heads,
                "positions": 512,
            },
            "sample": {"prompts": language.prompts, "group": language.group},
            "kl": {"place": "loss", "coef": language.beta, "loss": "ratio_k3"},
            "region": {
                "minibatch": work.num_envs,
                "epochs": work.epochs,
                "clip": work.clip,
                "learning_rate": work.learning_rate,
                "max_grad_norm": work.max_grad_norm,
            },
        }
    )
    task = Noise("noise", language.prompt_tokens, work.rollout_steps, alphabet)
    session = open_session(config, task, build_tokenizer(alphabet, ()))
    reference = session.agent.initial.clone()
    session.source = Endless(**{**vars(session.source), "reference": reference})
    return session


if __name__ == "__main__":
    work = job()
    language = SimpleNamespace(**work.language)
    session = endless(work, language)
    loop, clock = run(session, initial_state(session)), Clock(work)
    seen = []
    for _ in range(work.warmup + work.iterations):
        clock.tick()
        seen.append(next(loop).metrics)
    clock.tick()
    lengths = {metrics["rollout/length_mean"] for metrics in seen}
    if lengths != {float(work.rollout_steps)}:
        raise RuntimeError(f"completions of {lengths} tokens, expected {work.rollout_steps}")
    kept = seen[work.warmup :]

    def typical(name: str) -> float:
        return statistics.median(metrics[f"time/{name}_seconds"] for metrics in kept)

    whole = typical("rollout") + typical("score") + typical("update")
    answer(
        clock,
        ["keel-rl", "torch", "transformers"],
        parameters=session.agent.initial.numel(),
        choices={"threads": session.choices["threads"]},
        overhead={"certify": typical("certify") / whole},
        generate_seconds=typical("rollout"),
        update_seconds=typical("score") + typical("update"),
    )

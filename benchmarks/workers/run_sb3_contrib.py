"""sb3-contrib's TRPO, whose policy and critic share the CNN, as ours do here."""

import statistics
import time

from common import answer, job
from sb3_contrib import TRPO
from sb3_envs import learn, make_envs, set_threads
from torch import nn


class Timed(TRPO):
    """Remembers how long its updates take."""

    def train(self) -> None:
        begin = time.perf_counter()
        super().train()
        UPDATES.append(time.perf_counter() - begin)


UPDATES: list[float] = []

if __name__ == "__main__":
    work = job()
    set_threads(work.threads)
    network = {"pi": work.hidden, "vf": work.hidden}
    model = Timed(
        policy="CnnPolicy" if work.pixels else "MlpPolicy",
        env=make_envs(work),
        n_steps=work.rollout_steps,
        batch_size=work.minibatch,
        n_critic_updates=work.epochs,
        learning_rate=work.learning_rate,
        gamma=work.gamma,
        gae_lambda=work.lam,
        cg_max_steps=work.cg_iters,
        cg_damping=work.damping,
        target_kl=work.max_kl,
        sub_sampling_factor=1,
        policy_kwargs={} if work.pixels else {"net_arch": network, "activation_fn": nn.Tanh},
        seed=work.seed,
        device="cpu",
    )
    clock = learn(model, work)
    answer(
        clock,
        ["sb3-contrib", "stable-baselines3", "torch", "gymnasium"],
        update_seconds=statistics.median(UPDATES[work.warmup :]),
    )

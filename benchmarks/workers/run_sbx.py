"""sbx: Stable-Baselines3's PPO with the network and the update in JAX.

Its CNN is shared by copying weights between actor and critic, each with a pass of its own.
"""

import os

from common import answer, job

work = job()
if work.threads == 1:  # before JAX starts its thread pool
    os.environ["NPROC"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

from sb3_envs import arguments, learn, make_envs, set_threads  # noqa: E402
from sbx import PPO  # noqa: E402

if __name__ == "__main__":
    set_threads(1)  # torch only holds the rollout here
    kwargs = {} if work.pixels else {"net_arch": {"pi": work.hidden, "vf": work.hidden}}
    model = PPO(**arguments(work, make_envs(work)), policy_kwargs=kwargs)
    answer(learn(model, work), ["sbx-rl", "jax", "stable-baselines3", "gymnasium"])

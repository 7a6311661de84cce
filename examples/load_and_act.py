"""Load a policy in another process, without its training, and act.

python load_and_act.py [STEPS]
"""

import subprocess
import sys

import gymnasium

import keel


def play(run: str) -> float:
    """Return the return of one episode in an environment of Gymnasium's."""
    policy, env = keel.load(run), gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    state, total, over = None, 0.0, False
    while not over:
        action, state = policy.act(obs, state)
        obs, reward, terminated, truncated, _ = env.step(action)
        total, over = total + float(reward), terminated or truncated
    return total


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print("the other process:", play(sys.argv[2]))
    else:
        steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
        run = keel.train("CartPole-v1", total_steps=steps)
        subprocess.run([sys.executable, __file__, "act", str(run.path)], check=True)

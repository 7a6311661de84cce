"""A router that collapses onto one replica: its reward was never measured."""

from __future__ import annotations

from keel.cases.case import Case, Shown

CASE = Case(
    name="replica-collapse",
    title="a router that collapses onto one replica",
    note="004",
    symptom="A router sends most requests to one of four equal replicas; its reward is negative "
    "and never changes.",
    belief="The reward is badly shaped and always negative, so the policy learns where it loses "
    "least; exploration is too weak. The cure: other weights that make the reward positive, more "
    "entropy bonus, temperature pulses, a KL penalty, a larger network.",
    lesson="The reward said nothing about a choice: it is what the program falls back to while no "
    "request has finished. What was left to learn from was noise, of 64 requests an update, and a "
    "policy that nothing holds wanders with it; a reward that is measured does not stop that, "
    "rollouts of 2,048 requests do, in part because there are far fewer updates then. Replicas are "
    "equal and idle here, so there is nothing to win: the cured router is even, not faster.",
    preset="router-collapse",
    settings={"env": "serving", "threads": 1, "explore.entropy_coef": 0.002},
    forms={
        "short": {"total_steps": 1_280, "evaluation.episodes": 1},
        "usual": {"total_steps": 10_240},
        "full": {"total_steps": 40_960},
    },
    minutes={"short": "10 s", "usual": "1 minute", "full": "4 minutes"},
    shown=(
        Shown("rollout/action_share_max", "share of the commonest replica", "lower", ".0%"),
        Shown("rollout/return_std", "spread of the return between episodes", "higher"),
        Shown("rollout/return_mean", "return of an episode", "higher", ".4g"),
        Shown("train/entropy", "entropy of the policy, nats", "higher"),
    ),
    family="reward",
    rounds=2,
    repair={"envs.options.cold_start": False},
    repaired="No setting of the trainer mends a reward. It was called by hand, as the fix says: it "
    "returned the same for every choice, its fallback for an empty store of measurements. Now it "
    "is computed from what the simulator measures.",
)

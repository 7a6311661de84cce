"""A line search that gives up: aimed with the entropy bonus, accepted without."""

from __future__ import annotations

from keel.cases.case import Case, Shown

CASE = Case(
    name="line-search-collapse",
    title="a line search that gives up",
    note="002",
    symptom="A TRPO learns, and then its line search finds no step any more; the log shows a KL of "
    "0, which looks calm.",
    belief="At first: too few samples, a trust region that is too tight, too little exploration, a "
    "critic that is trained too little; so the second version has eight environments, a larger "
    "bound and five times the entropy bonus. An addendum then finds it: gradient and acceptance "
    "have different objectives, and a rejected step was logged as a KL of 0. Its cure: one "
    "objective, and a stabilizer that answers failures.",
    lesson="The addendum is right, and the log has it without the code: steps are promised and "
    "never accepted, under an entropy bonus. Once advantages are small beside the bonus, no step "
    "that raises the one raises the other. Rejections leave the policy as it is; where chance lets "
    "steps through again, they follow the bonus, and the return falls. Five times the bonus, the "
    "first thought, brings that about. A rejected step is no KL of 0: Keel logs none.",
    settings={
        "env": "CartPole-v1",
        "algo": "trpo",
        "threads": 1,
        "rollout_steps": 64,
        "envs.num": 32,
        "envs.normalize_reward": True,
        "network.share": False,
        "advantage.gamma": 0.99,
        "advantage.lam": 0.98,
        "advantage.normalize": "none",
        "region.max_kl": 0.02,
        "region.minibatch": 128,
        "region.epochs": 10,
        "region.learning_rate": 5e-4,
        "region.schedule": "constant",
        "natural.damping": 0.05,
        "natural.cg_iters": 15,
        "natural.backtrack_iters": 15,
        "natural.backtrack_coeff": 0.6,
        "natural.fisher_fraction": 1.0,
        "natural.accept_ratio": 0.1,
        "natural.land": False,
        "stabilizer.ls_fail_threshold": 0,
        "explore.entropy_coef": 0.05,
        "explore.entropy_decay": 0.9995,
        "explore.entropy_coef_min": 0.01,
        "faults.entropy_outside_acceptance": True,
    },
    forms={
        "short": {"total_steps": 81_920, "evaluation.episodes": 0},
        "usual": {"total_steps": 122_880},
        "full": {"total_steps": 307_200},
    },
    minutes={"short": "10 s", "usual": "½ minute", "full": "1 minute"},
    shown=(
        Shown("train/line_search_success", "accepted updates", "higher", ".0%", over="run"),
        Shown("rollout/return_mean", "return of an episode", "higher", ".4g"),
        Shown("train/entropy", "entropy of the policy, nats", "lower"),
    ),
    family="trust region",
)

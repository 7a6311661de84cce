"""A KL of several nats: the policy that is trained is not the one that sampled."""

from __future__ import annotations

from keel.cases.case import Case, Shown

CASE = Case(
    name="kl-explosion",
    title="an exploding KL",
    note="000",
    symptom="Three developers of a land game: a KL near 5 in every update, every ratio outside of "
    "the clip range, nothing but small buildings.",
    belief="Advantages were never normalized: they reach into the thousands, ratios leave the "
    "clip range with them, and so the KL explodes. Reward scale, learning rate, entropy bonus and "
    "separate networks had been tried before, in vain.",
    lesson="Both runs normalize their advantages, so that cannot be it. The KL is there before the "
    "first step: the update replays everybody's actions with the first developer's network and "
    "without the mask. Which fault the original program had is argued in the documentation; this "
    "is one that has its symptoms.",
    settings={
        "env": "land",
        "threads": 1,
        "envs.num": 64,
        "envs.options": {"reward": "legacy", "scale": 3000, "late_build_npv": True},
        "advantage.normalize": "batch",
        "advantage.clamp": 10.0,
        "advantage.gamma": 0.99,
        "region.minibatch": 480,
        "region.clip": 0.2,
        "region.learning_rate": 1e-4,
        "region.schedule": "constant",
        "region.adaptive_rate": False,
        "region.target_kl": None,
        "region.certify": False,
        "region.gate": False,
        "explore.entropy_coef": 0.08,
        "critic.normalize": "off",
        "faults.wrong_actor": True,
    },
    forms={
        "short": {"total_steps": 3_840, "envs.num": 16, "evaluation.episodes": 0},
        "usual": {"total_steps": 38_400, "evaluation.episodes": 0},
        "full": {"total_steps": 96_000},
    },
    minutes={"short": "10 s", "usual": "1 minute", "full": "2 minutes"},
    shown=(
        Shown("train/kl_exact", "exact KL(old‖new) of an update, nats", "lower"),
        Shown("train/gate_log_ratio", "largest |log ratio| before the first step", "lower", ".2g"),
        Shown("train/ratio_outside", "ratios outside of the clip range", "lower", ".1%"),
        Shown("train/entropy", "entropy of the policy that is trained, nats", "lower"),
    ),
    family="consistency",
    repair={"faults.wrong_actor": False},
    repaired="No setting mends that, the gate only stops it. The bug is fixed in the code: the "
    "update replays each developer's own network under the mask that it sampled with.",
    stops=True,
)

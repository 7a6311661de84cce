"""The modules that `make mutants` changes, and the test files that should notice."""

from __future__ import annotations

import os

UNIT, LAWS = "tests/unit", "tests/properties"
FUNCTIONAL = {
    "advantage": [f"{UNIT}/functional/test_advantage.py", f"{LAWS}/test_advantage_laws.py"],
    "gradient_certificate": [
        f"{UNIT}/functional/test_certificate.py",
        f"{LAWS}/test_remaining_laws.py",
    ],
    "cloning": [f"{UNIT}/functional/test_cloning.py", f"{LAWS}/test_remaining_laws.py"],
    "divergence": [
        f"{UNIT}/functional/test_divergence.py",
        f"{UNIT}/functional/test_natural.py",
        f"{LAWS}/test_divergence_laws.py",
    ],
    "estimators": [f"{UNIT}/functional/test_estimators.py", f"{LAWS}/test_estimator_laws.py"],
    "natural": [f"{UNIT}/functional/test_natural.py", f"{LAWS}/test_natural_laws.py"],
    "ratio": [
        f"{UNIT}/functional/test_ratio.py",
        f"{UNIT}/functional/test_statistics.py",
        f"{LAWS}/test_ratio_laws.py",
    ],
    "reduce": [
        f"{UNIT}/functional/test_reduce.py",
        f"{UNIT}/functional/test_advantage.py",
        f"{LAWS}/test_reduce_laws.py",
        f"{LAWS}/test_advantage_laws.py",
    ],
    "statistics": [f"{UNIT}/functional/test_statistics.py", f"{LAWS}/test_statistics_laws.py"],
    "surrogate": [f"{UNIT}/functional/test_surrogate.py", f"{LAWS}/test_surrogate_laws.py"],
    "value": [f"{UNIT}/functional/test_value.py", f"{LAWS}/test_value_laws.py"],
    "vocabulary": [f"{UNIT}/functional/test_vocabulary.py", f"{LAWS}/test_vocabulary_laws.py"],
    "walk_back": [f"{UNIT}/functional/test_walk_back.py"],
}
DEFAULTS = "test_region_defaults.py"
ALGORITHMS = {
    "controllers/demos": ["test_imitation.py", DEFAULTS],
    "trust_region/certify": ["test_certified_numbers.py", "test_certified.py", DEFAULTS],
    "algorithms/trpo": [
        "test_rescale_to_kl.py",
        "test_trpo.py",
        "test_stabilizer.py",
        "test_imitation.py",
        DEFAULTS,
    ],
    "controllers/controllers": [
        "test_controllers.py",
        "../tokens/test_token_controller.py",
        "test_stabilizer.py",
        "test_imitation.py",
        DEFAULTS,
    ],
    "algorithms/critic": ["test_critic_fit.py", "test_dense_critic.py", "test_trpo.py", DEFAULTS],
    "algorithms/dense": ["test_dense.py"],
    "algorithms/dense_critic": ["test_dense_critic.py"],
    "trust_region/diagnosis": ["test_diagnosis.py", "test_certified.py", "test_many_agents.py"],
    "trust_region/gate": [
        "test_certified.py",
        "test_many_agents.py",
        "test_critic_fit.py",
        "test_ppo.py",
    ],
    "losses/demos": ["test_imitation.py", DEFAULTS],
    "controllers/bandit": ["test_bandit.py", DEFAULTS],
    "trust_region/measure": [
        "test_kl_metrics.py",
        "test_certified_numbers.py",
        "test_certified.py",
        "test_many_agents.py",
    ],
    "losses/ppo": ["test_ppo.py", "test_penalties.py", "test_dense.py", DEFAULTS],
    "algorithms/ppo": [
        "test_early_stop.py",
        "test_ppo.py",
        "test_penalties.py",
        "test_imitation.py",
        DEFAULTS,
    ],
    "algorithms/happo": ["test_many_agents.py", DEFAULTS],
    "algorithms/popart": ["test_popart.py"],
    "networks/accelerate": ["../networks/test_accelerate.py"],
    "experience/batch": [
        "test_micro_batches.py",
        "test_kl_metrics.py",
        "test_many_agents.py",
        "test_ppo.py",
        "test_dense.py",
        "test_imitation.py",
    ],
    "algorithms/optimizer": [
        "test_micro_batches.py",
        "test_ppo.py",
        "test_dense.py",
    ],
    "algorithms/supervised": ["../tokens/test_token_terms.py", DEFAULTS],
    "losses/surrogates": ["../training/test_own_losses.py", "test_ppo.py"],
    "losses/token": ["../tokens/test_token_terms.py", DEFAULTS],
}
SERVING = f"{UNIT}/apps/serving"
MODULES: dict[str, list[str]] = {
    **{f"functional/{name}.py": tests for name, tests in FUNCTIONAL.items()},
    **{
        f"{name}.py": [os.path.normpath(f"{UNIT}/algorithms/{test}") for test in tests]
        for name, tests in ALGORITHMS.items()
    },
    "experience/targets.py": [
        *(
            f"{UNIT}/experience/test_{name}.py"
            for name in (
                "target_groups",
                "target_statistics",
                "inserted_rows",
                "collect",
                "sampled_targets",
            )
        ),
        f"{UNIT}/networks/test_recurrent.py",
    ],
    "apps/language/advantages.py": [f"{UNIT}/tokens/test_token_advantages.py"],
    **{
        f"apps/serving/{name}.py": [
            f"{SERVING}/test_plain_cluster.py",
            f"{SERVING}/test_plain_routers.py",
            f"{SERVING}/test_serving_numbers.py",
        ]
        for name in ("kernels", "kernels_batch", "kernels_cache", "kernels_vector")
    },
    "apps/serving/kernels_route.py": [
        f"{SERVING}/test_plain_cluster.py",
        f"{SERVING}/test_plain_routers.py",
        f"{SERVING}/test_serving_numbers.py",
        f"{SERVING}/test_routers.py",
    ],
    "apps/serving/kernels_draw.py": [
        f"{SERVING}/test_plain_routers.py",
        f"{SERVING}/test_routers.py",
    ],
}
"""Modules below `src/keel`, and the test files that are theirs, the quickest first."""


def group_of(module: str) -> str:
    """Return the part of Keel that a module belongs to, as the report names it."""
    if module.startswith("apps/serving/"):
        return "serving kernels"
    return {
        "experience/targets.py": "targets of experience",
        "apps/language/advantages.py": "token advantages",
    }.get(module, "functional" if module.startswith("functional/") else "algorithms")


def without_jit(module: str) -> bool:
    """Return whether the module's own functions are compiled by numba.

    Their tests run them as plain Python: numba would compile every mutant for half a minute, and
    its cache does not notice that a function changed which another one has inlined.
    """
    return module.startswith("apps/serving/kernels")

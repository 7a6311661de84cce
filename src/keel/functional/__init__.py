"""The mathematics of the trust region: pure, typed, shape-checked torch functions.

No state, no input or output, no global random generator: what a function needs is an argument, and
what it learns is in its result. Losses are per element; only `aggregate` averages them.

Modules are loaded when one of their names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keel.functional.walk_back import WalkBack, walk_back  # now: a module has the same name

if TYPE_CHECKING:
    from keel.functional import surrogate, value
    from keel.functional.advantage import (
        Advantages,
        Normalized,
        dr_grpo,
        gae,
        grpo,
        n_step,
        normalize,
        reinforce_pp,
        reward_to_go,
        rloo,
        token_gae,
    )
    from keel.functional.cloning import CloningWeight, cloning_weight
    from keel.functional.divergence import (
        Divergence,
        bernoulli_fisher,
        bernoulli_kl,
        categorical_entropy,
        categorical_fisher,
        categorical_kl,
        distribution_kl,
        gaussian_fisher,
        gaussian_kl,
        jensen_shannon,
        kl_terms,
        multi_categorical_kl,
        squashed_gaussian_kl,
        total_variation,
    )
    from keel.functional.estimators import k1, k2, k3, kl_estimate, kl_loss, kl_reward
    from keel.functional.gradient_certificate import Certificate, certificate
    from keel.functional.natural import (
        ConjugateGradient,
        Linear,
        LineSearch,
        Trial,
        conjugate_gradient,
        fisher_vector_product,
        flatten,
        line_search,
        linearize,
        unflatten,
    )
    from keel.functional.ratio import (
        Ratio,
        RatioReport,
        effective_sample_size,
        policy_ratio,
        ratio_report,
    )
    from keel.functional.reduce import aggregate, denominator
    from keel.functional.statistics import (
        Interval,
        Moments,
        TrimmedMean,
        empty_moments,
        explained_variance,
        holm,
        interquartile_mean,
        merge_moments,
        performance_profile,
        probability_of_improvement,
        stratified_bootstrap,
        t_interval,
        t_test,
        trimmed_mean,
        update_moments,
        wilson_interval,
    )
    from keel.functional.vocabulary import TokenLogProb, vocabulary_kl, vocabulary_log_prob

_NAMES = {
    "advantage": (
        "Advantages Normalized dr_grpo gae grpo n_step normalize reinforce_pp reward_to_go rloo "
        "token_gae"
    ),
    "gradient_certificate": "Certificate certificate",
    "cloning": "CloningWeight cloning_weight",
    "divergence": (
        "Divergence bernoulli_fisher bernoulli_kl categorical_entropy categorical_fisher "
        "categorical_kl distribution_kl gaussian_fisher gaussian_kl jensen_shannon kl_terms "
        "multi_categorical_kl squashed_gaussian_kl total_variation"
    ),
    "estimators": "k1 k2 k3 kl_estimate kl_loss kl_reward",
    "natural": (
        "ConjugateGradient LineSearch Linear Trial conjugate_gradient fisher_vector_product "
        "flatten line_search linearize unflatten"
    ),
    "ratio": "Ratio RatioReport effective_sample_size policy_ratio ratio_report",
    "reduce": "aggregate denominator",
    "statistics": (
        "Interval Moments TrimmedMean empty_moments explained_variance holm interquartile_mean "
        "merge_moments performance_profile probability_of_improvement stratified_bootstrap "
        "t_interval t_test trimmed_mean update_moments wilson_interval"
    ),
    "vocabulary": "TokenLogProb vocabulary_kl vocabulary_log_prob",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Advantages",
    "Certificate",
    "CloningWeight",
    "ConjugateGradient",
    "Divergence",
    "Interval",
    "LineSearch",
    "Linear",
    "Moments",
    "Normalized",
    "Ratio",
    "RatioReport",
    "TokenLogProb",
    "Trial",
    "TrimmedMean",
    "WalkBack",
    "aggregate",
    "bernoulli_fisher",
    "bernoulli_kl",
    "categorical_entropy",
    "categorical_fisher",
    "categorical_kl",
    "certificate",
    "cloning_weight",
    "conjugate_gradient",
    "denominator",
    "distribution_kl",
    "dr_grpo",
    "effective_sample_size",
    "empty_moments",
    "explained_variance",
    "fisher_vector_product",
    "flatten",
    "gae",
    "gaussian_fisher",
    "gaussian_kl",
    "grpo",
    "holm",
    "interquartile_mean",
    "jensen_shannon",
    "k1",
    "k2",
    "k3",
    "kl_estimate",
    "kl_loss",
    "kl_reward",
    "kl_terms",
    "line_search",
    "linearize",
    "merge_moments",
    "multi_categorical_kl",
    "n_step",
    "normalize",
    "performance_profile",
    "policy_ratio",
    "probability_of_improvement",
    "ratio_report",
    "reinforce_pp",
    "reward_to_go",
    "rloo",
    "squashed_gaussian_kl",
    "stratified_bootstrap",
    "surrogate",
    "t_interval",
    "t_test",
    "token_gae",
    "total_variation",
    "trimmed_mean",
    "unflatten",
    "update_moments",
    "value",
    "vocabulary_kl",
    "vocabulary_log_prob",
    "walk_back",
    "wilson_interval",
]


def __getattr__(name: str) -> Any:
    if name in ("surrogate", "value"):
        return importlib.import_module(f"keel.functional.{name}")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"keel.functional.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'keel.functional' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""The mathematics of the trust region: pure, typed, shape-checked torch functions.

No state, no input or output, no global random generator: what a function needs is an argument, and
what it learns is in its result. Losses are per element; only `aggregate` averages them.

Modules are loaded when one of their names is first used.
"""

from typing import TYPE_CHECKING

from keel.functional import surrogate as surrogate
from keel.functional import value as value
from keel.functional.walk_back import WalkBack as WalkBack  # now: a module is called so, too
from keel.functional.walk_back import walk_back as walk_back
from keel.registry import lazy_names

if TYPE_CHECKING:  # type checkers may see more than there is in `__all__`
    from keel.functional.advantage import *  # noqa: F403
    from keel.functional.cloning import *  # noqa: F403
    from keel.functional.divergence import *  # noqa: F403
    from keel.functional.estimators import *  # noqa: F403
    from keel.functional.gradient_certificate import *  # noqa: F403
    from keel.functional.natural import *  # noqa: F403
    from keel.functional.ratio import *  # noqa: F403
    from keel.functional.reduce import *  # noqa: F403
    from keel.functional.statistics import *  # noqa: F403
    from keel.functional.vocabulary import *  # noqa: F403

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
__all__ = sorted(
    ["WalkBack", "surrogate", "value", "walk_back", *" ".join(_NAMES.values()).split()]
)
__getattr__ = lazy_names(__name__, _NAMES)


def __dir__() -> list[str]:
    return __all__

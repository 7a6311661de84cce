"""The architecture, held by tests: who may import whom, and what purity means."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keel
import keel.functional

SOURCE = Path(keel.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
FUNCTIONAL = sorted((SOURCE / "functional").glob("*.py"))

BASE = {"data", "errors", "registry"}
MATHEMATICS = BASE | {"functional"}
NETWORKS = MATHEMATICS | {"config", "types", "resources", "distributions", "kernels"}
EXPERIENCE = NETWORKS | {"networks", "envs", "processes"}
LOSSES = EXPERIENCE | {"experience"}
TRUST_REGION = LOSSES | {"losses"}
ALGORITHMS = TRUST_REGION | {"trust_region"}
EXPERIMENTS = ALGORITHMS | {"algorithms"}
TRAINING = EXPERIMENTS | {"experiments", "controllers", "tracking", "doctor", "presets", "trust"}
WHOLE = TRAINING | {"training"}
MAY_IMPORT = {
    "": {
        "errors",
        "functional",
        "cli",
        "compare",
        "config",
        "look",
        "printing",
        "processes",
        "templates",
        "training",
        "envs",
        "registry",
        "controllers",
        "doctor",
        "explain",
        "types",
    },  # single files; names are lazy
    "functional": BASE,
    "config": BASE,
    "distributions": MATHEMATICS | {"types"},
    "kernels": MATHEMATICS | {"distributions"},
    "networks": NETWORKS,
    "envs": MATHEMATICS | {"config", "processes", "resources", "types"},
    "experience": EXPERIENCE,
    "losses": LOSSES,
    "trust_region": TRUST_REGION,
    "algorithms": ALGORITHMS,
    "experiments": EXPERIMENTS,
    "controllers": BASE | {"types"},
    "tracking": MATHEMATICS | {"look", "printing", "resources"},
    "doctor": MATHEMATICS | {"config", "tracking", "look", "printing", "templates"},
    "training": TRAINING | {"look"},
    "presets": BASE | {"config"},
    "explain": MATHEMATICS | {"look"},
    "integrations": MATHEMATICS | {"tracking", "doctor"},
    "compare": MATHEMATICS | {"config", "tracking", "look", "printing", "templates"},
    "ablate": WHOLE,
    "tune": WHOLE,
    "probes": WHOLE | {"apps"},
    "bench": WHOLE,
    "apps": WHOLE | {"look", "templates"},
    "cases": WHOLE | {"apps", "look", "printing", "templates"},
    "cli": WHOLE
    | {"explain", "compare", "ablate", "tune", "probes", "bench", "apps", "cases"}
    | {"look", "printing"},
}
"""Data flows left to right: what stands on the left may be imported by what stands on the right."""


def folder_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


MAY_NAME = {
    "envs/names.py": {"apps"},
    "trust.py": {"ablate"},
    "config/common.py": {"losses", "networks", "training", "functional", "envs"},
    "training/kinds.py": {"apps"},
}
"""Names of what comes with Keel (aliases of environments, functions, kinds of runs), in texts that
point right: nothing is imported before its use."""
NAMED_MODULE = re.compile(r"keel((?:\.[a-z_]\w*)+)(?::\w+)?")
"""A text that is nothing but the name of a module, or of something in one."""


def keel_imports(path: Path) -> set[str]:
    """Return the parts of Keel that a file imports, or names in a text of its own.

    What stands below `if TYPE_CHECKING`, and documentation, is passed over.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for inner in ast.walk(node)
    }
    modules = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "keel":
            modules += [f"keel.{alias.name}" for alias in node.names if _exists(f".{alias.name}")]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = NAMED_MODULE.fullmatch(node.value)
            modules += [node.value.partition(":")[0]] if name and _exists(name[1]) else []
    return {name.split(".")[1] for name in modules if name.startswith("keel.")}


def _exists(dotted: str) -> bool:
    """Return whether `.part.module` is a module of Keel, or something in one."""
    parts = dotted[1:].split(".")
    return (SOURCE / parts[0]).is_dir() or (SOURCE / f"{parts[0]}.py").is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_left(path: Path) -> None:
    folder = folder_of(path)
    assert folder in MAY_IMPORT, f"say in MAY_IMPORT what {folder}/ may import"
    named = MAY_NAME.get(path.relative_to(SOURCE).as_posix(), set())
    assert keel_imports(path) - {folder} - named <= MAY_IMPORT[folder]


def test_the_table_of_folders_is_the_whole_one() -> None:
    """CONTRIBUTING.md shows every folder, with what stands directly left of it."""
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `src/keel/(\w+)` \| [^|]+ \| ([^|]*) \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(MAY_IMPORT) - {""}
    for name, cell in rows:
        said = set(re.findall(r"`(\w+)`", cell))
        assert said <= MAY_IMPORT[name], name
        assert cell == "all of these" or said, name


def test_only_kernels_import_numba() -> None:
    core = [path for path in MODULES if folder_of(path) not in ("kernels", "apps", "")]
    offenders = [
        str(path.relative_to(SOURCE))
        for path in core
        if re.search(r"^\s*(from|import) numba\b", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not offenders


def test_a_module_that_is_named_in_a_text_counts(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text('LAZY = {"train": "keel.training.api"}\nENTRY = "keel.apps.land:make"\n')
    assert keel_imports(path) == {"training", "apps"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


LONGEST_FUNCTION = 60
"""Lines, docstring included; files of kernels (`kernels/`, `kernels_….py`) may have more."""


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_stay_short(path: Path) -> None:
    if folder_of(path) == "kernels" or path.stem.startswith("kernels"):
        return
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


MOST_MODULES = 75
"""Modules of Keel that a run on CartPole imports: what it does not use is not among them."""


def test_a_run_imports_what_it_uses(tmp_path: Path) -> None:
    script = (
        "import sys, keel\n"
        f"for i, _ in enumerate(keel.iterate('CartPole-v1', runs={str(tmp_path)!r})):\n"
        "    names = [x for x in sys.modules if x.partition('.')[0] == 'keel']\n"
        "    if i == 2: break  # a run that ends is diagnosed\n"
        "print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    others = {f"keel.envs.{name}" for name in ("atari", "multi", "pool", "sync", "workers")}
    assert "keel.envs.vector" in modules
    assert not modules & {*others, "keel.experience.demos", "keel.processes"}
    assert len(modules) <= MOST_MODULES, sorted(modules)


FORBIDDEN_CALLS = {"open", "print", "input", "manual_seed", "seed", "set_rng_state", "exec", "eval"}
FORBIDDEN_MODULES = {"random", "numpy.random", "os", "sys", "io", "pathlib", "logging", "time"}
SAMPLERS = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal"}


@pytest.mark.parametrize("path", FUNCTIONAL, ids=lambda p: p.name)
def test_functional_has_no_io_no_global_rng_and_no_hidden_state(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        assert not isinstance(node, ast.Global | ast.Nonlocal), f"{where}: state outside arguments"
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert not FORBIDDEN_MODULES & set(names), f"{where}: input, output or global RNG"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            own_generator = ast.unparse(node).startswith("torch.Generator()")
            assert own_generator or name not in FORBIDDEN_CALLS, f"{where}: {name}()"
            if name in SAMPLERS:
                given = {keyword.arg for keyword in node.keywords}
                assert "generator" in given, f"{where}: {name}() draws from the global generator"


@pytest.mark.parametrize("path", FUNCTIONAL, ids=lambda p: p.name)
def test_functional_module_variables_are_constants(path: Path) -> None:
    """Nothing at module level is assigned to again, nor changed in place by a method call."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    mutators = {"append", "extend", "update", "add", "pop", "clear", "setdefault", "insert"}
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                assert not (owner in constants and node.func.attr in mutators)
            if isinstance(node, ast.Assign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    root = ast.unparse(target).split("[")[0].split(".")[0]
                    is_item = not isinstance(target, ast.Name)
                    assert not (is_item and root in constants), f"{path.name}:{node.lineno}"


def test_help_imports_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; from keel.cli import main; main(['--help']);"
        "heavy = {'torch', 'numpy', 'matplotlib', 'gymnasium'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "explain" in done.stdout


PUBLIC = [
    "AdaptiveKLController",
    "Config",
    "EstimatorWarning",
    "FixedKLController",
    "InputError",
    "KeelError",
    "Policy",
    "Run",
    "ShapeError",
    "__version__",
    "check_env",
    "compare_runs",
    "diagnose",
    "errors",
    "evaluate",
    "explain",
    "functional",
    "iterate",
    "load",
    "register_advantage",
    "register_controller",
    "register_distribution",
    "register_loss",
    "register_network",
    "resume",
    "train",
]
FUNCTIONAL_NAMES = """
Advantages Certificate CloningWeight ConjugateGradient Divergence Interval LineSearch Linear Moments
Normalized Ratio RatioReport TokenLogProb Trial TrimmedMean WalkBack aggregate bernoulli_fisher
bernoulli_kl
categorical_entropy categorical_fisher categorical_kl certificate cloning_weight conjugate_gradient
denominator distribution_kl dr_grpo effective_sample_size empty_moments explained_variance
fisher_vector_product flatten gae gaussian_fisher gaussian_kl grpo holm interquartile_mean
jensen_shannon k1 k2 k3 kl_estimate kl_loss kl_reward kl_terms line_search linearize merge_moments
multi_categorical_kl n_step normalize performance_profile policy_ratio probability_of_improvement
ratio_report reinforce_pp reward_to_go rloo squashed_gaussian_kl stratified_bootstrap surrogate
t_interval t_test token_gae total_variation trimmed_mean unflatten update_moments value
vocabulary_kl vocabulary_log_prob walk_back wilson_interval
""".split()  # noqa: SIM905


def test_public_names_are_these() -> None:
    """A change here is a change for users: it belongs into CHANGELOG.md."""
    assert keel.__all__ == PUBLIC
    assert keel.functional.__all__ == FUNCTIONAL_NAMES
    assert dir(keel) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist(name: str) -> None:
    assert getattr(keel, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = keel.trian

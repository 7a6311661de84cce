"""Tasks, rewards and estimators of one's own: objects, names, `module:attribute`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keel import registry
from keel.apps.language import train_language
from keel.apps.language.advantages import check_estimator, token_targets
from keel.apps.language.build import build_rewards
from keel.apps.language.config import Language, from_dict
from keel.apps.language.registries import ESTIMATORS, REWARDS, TASKS
from keel.apps.language.rewards import load_function
from keel.apps.language.tasks import Example, task_named
from keel.cli import main
from keel.config import to_dict
from keel.errors import InputError
from keel.tracking.record import read_config
from keel.trust import UntrustedCodeError, require_trust

SOURCE = """
from dataclasses import dataclass
from keel.apps.language.tasks import Example

@dataclass(frozen=True)
class Copy:
    length: int = 1
    name = "copy"
    max_new_tokens = 4
    stop = None

    def example(self, rng):
        text = "".join(str(x) for x in rng.integers(0, 10, self.length))
        return Example(text + "=", text, {})

    def verify(self, example, completion):
        return float(completion == example.answer)

two = Copy(2)

class Half:
    name, max_new_tokens, stop = "half", 4, None

def short(example, text):
    return float(len(text) < 3)

def halved(score, group, groups, baseline):
    return 0.5 * (score - baseline)

def discounted(reward, value, gamma):
    return reward - value, gamma * reward

def greedy(reward, temperature):
    return reward

def flat(score):
    return score.mean()
"""
TINY = {
    "model": {"hidden": 16, "layers": 1, "heads": 2},
    "sample": {"prompts": 2, "group": 2},
    "region": {"minibatch": 4},
    "warmup": {"examples": 4, "epochs": 1},
    "evaluation": {"prompts": 4},
    "total_steps": 8,
    "control": False,
    "threads": 1,
}
FLAGS = (
    *("--model.hidden", "16", "--model.layers", "1", "--model.heads", "2", "--sample.prompts", "2"),
    *("--sample.group", "2", "--region.minibatch", "4", "--warmup.examples", "4"),
    *("--warmup.epochs", "1", "--evaluation.prompts", "4", "--total-steps", "8", "--no-control"),
    *("--threads", "1", "--quiet", "--name", "mine"),
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_tasks.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KEEL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "_objects", {})
    for entries in (TASKS, REWARDS, ESTIMATORS):
        monkeypatch.setattr(entries, "_entries", {})
    monkeypatch.delitem(sys.modules, "own_tasks", raising=False)
    return tmp_path


def own() -> Any:
    return __import__("own_tasks")


def test_a_class_takes_options_and_an_object_is_as_it_is() -> None:
    assert task_named("own_tasks:Copy", length=3).example.__self__.length == 3
    assert task_named("own_tasks:two").verify(Example("12=", "12", {}), "12") == 1.0
    with pytest.raises(InputError, match="option of task own_tasks:Copy: 'lenght' is not one of"):
        task_named("own_tasks:Copy", lenght=3)
    with pytest.raises(InputError, match="task own_tasks:two is made already"):
        task_named("own_tasks:two", length=3)
    with pytest.raises(InputError, match=r"task own_tasks:Half: expected name, .*no example"):
        task_named("own_tasks:Half")
    with pytest.raises(InputError, match=r"task: 'lokup' is not one of .*did you mean 'lookup'\?"):
        from_dict({"task": "lokup"})


def test_objects_become_import_paths() -> None:
    config = from_dict({"task": own().Copy, "reward": {"functions": [own().short, "task*0.5"]}})
    assert config.task == "own_tasks:Copy"
    assert config.reward.functions == ("own_tasks:short", "task*0.5")
    TASKS.register("of_mine")(own().Copy)
    assert from_dict({"task": "of_mine"}).task == "own_tasks:Copy"
    REWARDS.register("short_of_mine")(own().short)
    named = from_dict({"reward": {"functions": "short_of_mine*0.25"}})
    assert named.reward.functions == ("own_tasks:short*0.25",)
    assert load_function("short_of_mine") is own().short


def test_rewards_are_weighed_as_before() -> None:
    config = from_dict({"reward": {"functions": "task*0.5, own_tasks:short*0.25"}})
    rewards = build_rewards(config, task_named("own_tasks:Copy"), 4)
    assert rewards.weights == {"task": 0.5, "short": 0.25}
    assert rewards([Example("1=", "1", {})], ["1"]).score.tolist() == [0.75]
    typed = Language(reward=type(Language().reward)(functions=("task*0.5,own_tasks:short",)))
    assert list(build_rewards(typed, task_named("own_tasks:Copy"), 4).functions) == [
        "task",
        "short",
    ]


def test_a_file_that_names_a_task_needs_trust() -> None:
    with pytest.raises(UntrustedCodeError, match="task own_tasks:Copy"):
        require_trust(to_dict(from_dict({"task": "own_tasks:Copy"})), "x")


def test_it_trains_from_python_and_from_the_command_line(here: Path) -> None:
    pytest.importorskip("transformers")
    run = train_language(
        {"task": own().Copy, "task_options": "length=2", **TINY}, here / "runs", "one"
    )
    *_, last = run
    assert last.iteration.steps == 8
    assert read_config(here / "runs" / "one" / "seed-0")["task"] == "own_tasks:Copy"
    words = ("--task", "own_tasks:Copy", "--task_options", "length=2", "--region.loss", "cispo")
    assert main(["train", "language", *words, *FLAGS]) == 0
    stored = read_config(here / "runs" / "mine" / "seed-0")
    assert (stored["task"], stored["region"]["loss"]) == ("own_tasks:Copy", "cispo")


def test_an_estimator_gets_what_it_names() -> None:
    """Half of 1 − ¼ and 0 − ¼, on all tokens; by token γ = ½, the score on the last, V = ¼."""
    score, weight = torch.tensor([1.0, 0.0]), torch.ones(2, 2)
    zero, baseline = torch.zeros(2, 2), torch.full((2,), 0.25)
    found = token_targets(from_dict({"algo": own().halved}), score, weight, zero, zero, baseline)
    assert found.advantage.tolist() == [[0.375, 0.375], [-0.125, -0.125]]
    assert not found.target.any()
    config = from_dict({"algo": "own_tasks:discounted", "advantage": {"gamma": 0.5}})
    found = token_targets(config, score, weight, zero, torch.full((2, 2), 0.25))
    assert found.raw.tolist() == [[-0.25, 0.75], [-0.25, -0.25]]
    assert found.target.tolist() == [[0.0, 0.5], [0.0, 0.0]]
    assert found.advantage.mean().item() == pytest.approx(0.0, abs=1e-6)


def test_an_estimator_that_asks_for_too_much_is_refused() -> None:
    with pytest.raises(InputError, match=r"own_tasks:discounted: names value; set model\.critic"):
        check_estimator(from_dict({"algo": "own_tasks:discounted"}))
    check_estimator(from_dict({"algo": "own_tasks:discounted", "model": {"critic": "head"}}))
    with pytest.raises(InputError, match="'temperature'; an estimator may name score, reward, "):
        check_estimator(from_dict({"algo": own().greedy}))
    nothing = torch.zeros(2, 3)
    with pytest.raises(InputError, match=r"expected advantages \[2\] or \[2, 3\], alone or with"):
        token_targets(from_dict({"algo": own().flat}), nothing[:, 0], nothing, nothing, nothing)


def test_an_estimator_trains_from_python_a_file_and_the_command_line(here: Path) -> None:
    pytest.importorskip("transformers")
    ESTIMATORS.register("halved")(own().halved)
    (here / "mine.yaml").write_text("algo: own_tasks:halved\n")
    with pytest.raises(UntrustedCodeError, match="algo own_tasks:halved"):
        require_trust(to_dict(from_dict({"algo": "own_tasks:halved"})), "x")
    *_, last = train_language({"algo": "halved", **TINY}, here / "runs", "one")
    assert "train/explained_variance" not in last.metrics
    assert main(["train", "language", "--config", "mine.yaml", "--trust-code", *FLAGS]) == 0
    words = ["--algo", "own_tasks:discounted", "--model.critic", "head", *FLAGS]
    assert main(["train", "language", *words, "--name", "two"]) == 0
    stored = {name: read_config(here / "runs" / name / "seed-0") for name in ("one", "mine", "two")}
    assert [stored[name]["algo"] for name in ("one", "mine")] == ["own_tasks:halved"] * 2
    assert stored["two"]["algo"] == "own_tasks:discounted"

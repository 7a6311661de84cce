"""docs/results.md from the figures in docs/data/results.json."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from keel.compare.verdict import FEWEST, Problems, decide, effect_of

STEADY_BARS = {
    "CartPole-v1 sb3": 4.0,
    "CartPole-v1 sbx": 1.0,
    "HalfCheetah-v5 sb3": 2.5,
    "HalfCheetah-v5 sbx": 1.0,
    "Breakout sb3": 1.5,
    "HalfCheetah-v5 sb3-contrib": 2.5,
    "Breakout sb3-contrib": 1.0,
    "CartPole-v1 sb3 sync": 1.0,
    "HalfCheetah-v5 sb3 sync": 1.0,
    "Breakout sb3 sync": 1.0,
    "HalfCheetah-v5 sb3-contrib sync": 1.0,
    "HalfCheetah-v5 sb3 envpool": 1.0,
    "HalfCheetah-v5 sb3-contrib envpool": 1.0,
}
STACKS = {
    "gymnasium sync": "Gymnasium",
    "gymnasium vector": "Gymnasium's vector",
    "envpool": "EnvPool",
    "ale": "ALE",
}
UPDATE_BARS = {"Breakout sb3-contrib": 3.0}
FISHER_BAR = 1.3
WHOLE_BARS = {"cold": 2.0, "warm": 3.0}
LEARNING_BARS = {
    "CartPole-v1": 475,
    "HalfCheetah-v5": 5000,
    "Hopper-v5": 2400,
    "Walker2d-v5": 3500,
    "HalfCheetah-v5 trpo": 4500,
    "Hopper-v5 trpo": 3000,
    "Walker2d-v5 trpo": 3800,
}
PUBLISHED = {
    "CartPole-v1": "RL Zoo 500 (100k steps); CleanRL 490 (500k)",
    "HalfCheetah-v5": "CleanRL 1,443 (v4); RL Zoo 5,819 (v3); Tianshou 5,784 (v3)",
    "Hopper-v5": "CleanRL 2,383 (v4); RL Zoo 2,410 (v3); Tianshou 2,609 (v3)",
    "Walker2d-v5": "CleanRL 2,288 (v4); RL Zoo 3,479 (v3); Tianshou 3,589 (v3)",
    "Ant-v5": "Tianshou 3,258 (v3)",
    "Humanoid-v5": "none that we could verify",
    "Acrobot-v1": "RL Zoo −74 (1M steps)",
    "LunarLander-v3": "RL Zoo 242 (v2, 1M)",
    "MountainCar-v0": "RL Zoo −110 (1M)",
    "MountainCarContinuous-v0": "RL Zoo 88 (20k)",
    "Pendulum-v1": "RL Zoo −172 (100k)",
    "HalfCheetah-v5 trpo": "Tianshou 4,471 (v3); RL Zoo 1,785 (v3)",
    "Hopper-v5 trpo": "RL Zoo 3,618 (v3)",
    "Walker2d-v5 trpo": "RL Zoo 4,933 (v3)",
}
CHANGED = (
    "TRPO's presets of Hopper and Walker2d were changed after they had been reported on seeds 100 "
    "to 104, where one seed of five stayed with a gait that falls after one leap (means of 2,712 "
    "and 4,186): the standard deviation of the actions now begins at 1, in place of 0.61. That was "
    "chosen on seeds 210 to 213 of Hopper (3,547 3,577 3,514 2,370) and 210 to 212 of Walker2d "
    "(5,229 5,080 5,278); with twice the rollout and half the bound beside it Hopper came to 2,896 "
    "3,222 1,523. Seeds 105 to 109 had not been looked at.",
)
PROTOCOLS = (
    "Published figures have protocols of their own (steps as ours where none are named):",
    "",
    "* **RL Zoo** (`benchmark.md` of rl-baselines3-zoo): *one* run, the likeliest action, about "
    "150,000 steps of evaluation. Its authors write that it is no quantitative benchmark for that "
    "reason. Within that one run the returns of episodes have a standard deviation of 357 (TRPO, "
    "Hopper) and 1,453 (TRPO, Walker2d).",
    "* **Tianshou** (`examples/mujoco`): ten seeds, ten test episodes each, and the *best* mean "
    "within the first million steps, not the last.",
    "* **CleanRL**: the mean return of training episodes, with exploration, at the end.",
    "",
    "Versions differ, too: v3 and v4 are not v5, whose Walker2d has the same friction under both "
    "feet, and whose Hopper and Walker2d pay nothing for health in the step of a fall.",
)


def write_page(data: dict[str, Any], path: Path) -> None:
    path.write_text(render(data), encoding="utf-8")


def render(data: dict[str, Any]) -> str:
    """The page, whole."""
    measured = data["measured"]
    return "\n".join(
        [
            "# Results",
            "",
            "Measured, not claimed: `make results` measures all of it again (hours), and "
            "`python -m benchmarks.results --help` parts of it. "
            f"Last on {measured['day']}: {measured['cores']} cores ({measured['machine']}, "
            f"shared), no GPU, Python {measured['python']}.",
            "",
            *speed(data.get("speed", {})),
            *learning(data.get("learning", {}), data.get("beside", {})),
        ]
    )


def speed(found: dict[str, Any]) -> list[str]:
    steady = {key: found[key] for key in STEADY_BARS if key in found}
    whole = {key: value for key, value in found.items() if value.get("whole")}
    lines = [
        "## Speed",
        "",
        "The same work on both sides: environment, number of environments, steps, minibatch, "
        "epochs, network. Each side is a process of its own, and they take turns of a second or a "
        "few, so that both feel the same machine; the peer has the number of threads that is best "
        "for it. The ratio is the median of the pairs. Everything that Keel does by default is on: "
        "guard, gate, exact KL over the whole rollout, metrics.",
        "",
        "What steps the environments: Keel by default takes the fastest that it has (Gymnasium's "
        "vectorised CartPole, EnvPool's MuJoCo, the ALE's own vector), the peers Gymnasium's "
        "environments one after the other in one process (`DummyVecEnv`). The last rows have the "
        "same on both sides: Gymnasium's one after the other (`--backend sync`), or EnvPool's, "
        "which the peers get by an adapter of ours (`--backend envpool`).",
        "",
        "Each row says on which day it was measured. Machines differ between days, always with two "
        "cores: ratios compare within a row, steps a second only among rows of one day.",
        "",
        "| algorithm, environment | environments, keel / peer | peer | keel, steps/s "
        "| peer, steps/s | ratio | each pair | bar | peak MB, keel / peer | measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, x in steady.items():
        pairs = " ".join(f"{a / b:.2f}" for a, b in zip(x["all_ours"], x["all_peer"], strict=True))
        bar = STEADY_BARS[key]
        wanted = "ahead" if bar == 1.0 else f"≥ {bar:g}×"
        lines.append(
            f"| {_algo(x)}, {x['env']} | {_stack(x)} | {x['peer_name']} | {x['ours']:,.0f} | "
            f"{x['peer']:,.0f} | **{x['ratio']:.2f}×** | {pairs} | {wanted} | "
            f"{x['ours_peak_mb']:,.0f} / {x['peer_peak_mb']:,.0f} | {x['day']} |"
        )
    lines += _trpo_speed(found)
    lines += [
        "",
        "What exactness costs, as shares of an iteration (the gate, where it replays all rows in "
        "every tenth update, adds 0.1 to 0.2 % on HalfCheetah):",
        "",
    ]
    lines += ["| algorithm, environment | exact KL and its company | guard |", "|---|---|---|"]
    for key, x in steady.items():
        if (
            not key.endswith(("sync", "envpool"))
            and x["peer_name"] in ("sb3", "sb3-contrib")
            and x.get("overhead")
        ):
            cost = x["overhead"]
            lines.append(
                f"| {_algo(x)}, {x['env']} | {cost['certify']:.1%} | {cost['guard']:.1%} |"
            )
    for x in whole.values():
        seconds = x["whole"]
        steps = x["settings"]["iterations"] * x["settings"]["num_envs"] * 128
        lines += [
            "",
            f"A whole run of {x['env']}, {steps:,} steps from the start of the process to its end:",
            "",
            f"| compile caches | keel | {x['peer_name']} | ratio | bar |",
            "|---|---|---|---|---|",
        ]
        for state, bar in WHOLE_BARS.items():
            lines.append(
                f"| {state} | {seconds[f'ours_{state}_seconds']:.1f} s | "
                f"{seconds[f'peer_{state}_seconds']:.1f} s | "
                f"**{seconds[f'ratio_{state}']:.2f}×** | ≥ {bar:g}× |"
            )
    if "first update" in found:
        seconds = found["first update"]["seconds"]
        each = ", ".join(f"{x:.1f}" for x in seconds)
        lines += [
            "",
            "From `keel train CartPole-v1` to its first update, with warm caches: "
            f"**{statistics.median(seconds):.1f} s** ({each}; bar < 5 s).",
        ]
    return [*lines, ""]


def _stack(x: dict[str, Any]) -> str:
    """Return what stepped the environments of either side, in words."""
    backend = x["choices"]["backend"]
    ours = STACKS.get(backend, backend)
    same = x["settings"].get("backend") == "envpool"
    return f"{ours} / {ours if same else STACKS['gymnasium sync']}"


def _algo(x: dict[str, Any]) -> str:
    return str(x["settings"].get("algo", "ppo")).upper()


def _trpo_speed(found: dict[str, Any]) -> list[str]:
    """Updates without their environments, and one Fisher-vector product."""
    lines = []
    for key, bar in UPDATE_BARS.items():
        told = found.get(key, {}).get("updates")
        if told:
            lines += [
                "",
                f"A TRPO update alone on {found[key]['env']}, Nature CNN with a shared trunk, the "
                "same CG iterations, Fisher sample and passes of the critic: "
                f"keel {told['ours']:.2f} s, {found[key]['peer_name']} {told['peer']:.2f} s, "
                f"**{told['ratio']:.2f}×** (bar ≥ {bar:g}×; measured {found[key]['day']}).",
            ]
    fisher = found.get("Fisher-vector product", {})
    for cnn, x in ((name, entry) for name, entry in fisher.items() if name != "day"):
        lines += [
            "",
            f"A Fisher-vector product on the {cnn} CNN, 512 rows, beside double backward in the "
            f"same memory layout: {1e3 * x['ours']:.0f} ms against {1e3 * x['peer']:.0f} ms, "
            f"**{x['ratio']:.2f}×** (bar ≥ {FISHER_BAR:g}×), equal to {x['error']:.0e}; measured "
            f"{fisher['day']}.",
        ]
    return lines


def learning(found: dict[str, Any], beside: dict[str, Any]) -> list[str]:
    lines = [
        "## Learning",
        "",
        "The final evaluation of the presets: ten whole episodes with the likeliest action "
        "(CartPole: twenty). The interquartile mean over seeds has "
        "Student's 95 % interval, the one of `keel compare`. The training return is that of the "
        "last 100 episodes, with exploration. Seeds 100 to 109 were never used to choose any of "
        "these presets, but CartPole's had been looked at before, when its preset was changed.",
        "",
        "| algorithm, environment | steps | seeds | mean | IQM | interval | bar | each seed "
        "| training return | published |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for env in PUBLISHED:
        if env not in found:
            continue
        x = found[env]
        each = " ".join(f"{run['return']:,.0f}" for run in x["runs"])
        training = " ".join(f"{run['training_return']:,.0f}" for run in x["runs"])
        low, high = x["interval"]
        bar = f"≥ {LEARNING_BARS[env]:,}" if env in LEARNING_BARS else "none"
        lines.append(
            f"| {_named(env)} | {x['steps']:,} | {_seeds(x['runs'])} | {x['mean']:,.0f} | "
            f"**{x['iqm']:,.0f}** | {low:,.0f} to {high:,.0f} | "
            f"{bar} | {each} | {training} | {PUBLISHED[env]} |"
        )
    lines += ["", *CHANGED, "", *PROTOCOLS]
    if beside:
        lines += ["", *_peers(beside, found)]
    lines += [
        "",
        "The trust region in all of these runs:",
        "",
        "| algorithm, environment | updates | largest exact KL(old‖new) kept | bound "
        "| over it | walked back or rejected |",
        "|---|---|---|---|---|---|",
    ]
    for env, x in found.items():
        lines.append(
            f"| {_named(env)} | {x['updates']:,} | {x['kl_max']:.5f} | {x['max_kl']:g} | "
            f"{sum(run.get('over', run['kl_max'] > run['max_kl']) for run in x['runs']):.0f} | "
            f"{x['walked_back']:.0f} ({x['walked_back'] / x['updates']:.1%}) |"
        )
    return [*lines, ""]


def _peers(beside: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The RL Zoo's settings, trained by their own library and evaluated as ours are."""
    lines = [
        "The RL Zoo's settings in their own library, trained here on the same version of the "
        "environment and evaluated as ours are; the last columns are Keel's preset against them, "
        "as `keel compare` judges it:",
        "",
        "| algorithm, environment | steps | seeds | mean | each seed | Keel's change (95 %) "
        "| verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, x in beside.items():
        runs = x["runs"]
        scores = [run["return_mean"] for run in runs]
        each = " ".join(f"{score:,.0f}" for score in scores)
        change, verdict = _against(scores, [run["return"] for run in ours[key]["runs"]])
        lines.append(
            f"| {_named(key)} | {runs[0]['steps']:,} | {_seeds(runs)} | "
            f"{statistics.mean(scores):,.0f} | {each} | {change} | {verdict} |"
        )
    return lines


def _against(peer: list[float], own: list[float]) -> tuple[str, str]:
    """Return the relative change from a peer's scores to ours, and the verdict, in words."""
    if min(len(peer), len(own)) < FEWEST:
        return "–", "too few seeds"
    effect = effect_of([torch.tensor(peer)], [torch.tensor(own)])
    change = f"{effect.estimate:+.0%} ({effect.low:+.0%} to {effect.high:+.0%})"
    return change, decide(effect, Problems(), Problems()).decision


def _seeds(runs: list[dict[str, Any]]) -> str:
    seeds = sorted(run["seed"] for run in runs)
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _named(key: str) -> str:
    env, _, algo = key.partition(" ")
    return f"{(algo or 'ppo').upper()}, {env}"

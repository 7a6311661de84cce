"""Clusters as environments: rewards, resuming, and a router that stands on its own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from keel.apps.serving import fields as f
from keel.apps.serving.cluster import equal_cluster
from keel.apps.serving.evaluation import evaluate_routers, gain, headroom
from keel.apps.serving.gym import ServingVectorEnv
from keel.apps.serving.observations import REPLICA
from keel.apps.serving.results import Report, summarize
from keel.apps.serving.scorer import make_scorer
from keel.apps.serving.settings import draw_scenario, held_out, make_setting
from keel.apps.serving.simulation import replay, simulate
from keel.apps.serving.tables import closed_form
from keel.apps.serving.throughput_reward import (
    AFTER,
    BEFORE,
    cold_start_metrics,
    compute_reward,
    initial_state,
)
from keel.apps.serving.vector import LATENCY_SCALE, vector_env
from keel.apps.serving.vector_clusters import VectorClusters
from keel.cli import main
from keel.config import from_dict
from keel.config.values import named_values
from keel.envs import make_envs
from keel.errors import InputError
from keel.presets import preset
from keel.training.session import agent_for
from keel.types import MASK

SMALL = {"requests": 40}


def test_the_rewards_of_an_episode_are_all_latencies() -> None:
    envs = vector_env(3, setting="mixed", **SMALL)
    envs.reset(1)
    rng, total = np.random.default_rng(0), np.zeros(3)
    for _ in range(SMALL["requests"]):
        step = envs.step(rng.integers(0, 4, 3))
        total += step.reward
    assert step.terminated.all()
    latency = step.episode_measures["latency"] * SMALL["requests"]
    np.testing.assert_allclose(-total * LATENCY_SCALE, latency, rtol=1e-5)
    np.testing.assert_allclose(step.episode_return, total, rtol=1e-5)


def test_many_clusters_are_each_alone() -> None:
    """The same choices in a single cluster give the same times."""
    setting = make_setting("mixed", **SMALL)
    envs = vector_env(2, setting="mixed", scenes="held-out", **SMALL)
    envs.reset(0)
    rng, chosen = np.random.default_rng(1), []
    for k in range(SMALL["requests"]):
        chosen.append(rng.integers(0, 4, 2))
        if k + 1 == SMALL["requests"]:
            envs.clusters.step(chosen[-1])
        else:
            envs.step(chosen[-1])
    for c, seed in enumerate(held_out(2)):
        scene = draw_scenario(setting, seed)
        alone = replay(scene.cluster, scene.workload, [x[c] for x in chosen])
        times = envs.clusters.result(c, "").requests.times
        np.testing.assert_allclose(times, alone.requests.times, rtol=1e-12)


def test_weights_are_what_a_choice_costs() -> None:
    """All that are at a replica, with the request and without, and nobody comes any more."""
    setting = make_setting("equal", replicas=2, requests=12)
    envs = vector_env(1, setting="equal", replicas=2, requests=12, scenes="held-out")
    envs.reset(0)
    choices = [0, 1, 0, 0, 1, 0, 1, 1]
    for choice in choices:
        envs.step(np.array([choice]))
    weight = envs.clusters.counterfactual_costs()[0]
    scene = draw_scenario(setting, held_out(1)[0])
    at, tables = len(choices), scene.cluster
    start = scene.workload.arrival[at]
    for choice in (0, 1):
        whole = replay(tables, scene.workload.part(0, at + 1), [*choices, choice]).requests
        without = replay(tables, scene.workload.part(0, at), choices).requests
        offset = scene.workload.arrival[0]
        after = np.maximum(0.0, whole.times[f.Q_FINISHED] - (start - offset)).sum()
        before = np.maximum(0.0, without.times[f.Q_FINISHED] - (start - offset)).sum()
        assert weight[choice] == pytest.approx(after - before, rel=1e-6)


def test_weights_of_first_tokens_and_of_lost_requests() -> None:
    """The same futures, weighed otherwise: seconds to the first token alone, then what is lost at
    a replica whose queue is full."""
    options = {"setting": "equal", "replicas": 2, "requests": 12, "scenes": "held-out"}
    setting = make_setting("equal", replicas=2, requests=12)
    scene, choices = draw_scenario(setting, held_out(1)[0]), [0, 1, 0, 0, 1, 0, 1, 1]
    envs = vector_env(1, weight_end=0.0, weight_first=2.0, **options)
    envs.reset(0)
    for choice in choices:
        envs.step(np.array([choice]))
    weight = envs.clusters.counterfactual_costs()[0]
    start = scene.workload.arrival[len(choices)] - scene.workload.arrival[0]

    def waited(count: int, where: list[int]) -> float:
        times = replay(scene.cluster, scene.workload.part(0, count), where).requests.times
        return float(np.maximum(0.0, times[f.Q_FIRST_TOKEN] - start).sum())

    for choice in (0, 1):
        extra = waited(len(choices) + 1, [*choices, choice]) - waited(len(choices), choices)
        assert weight[choice] == pytest.approx(2.0 * extra, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("reward", ["latency", "counterfactual"])
def test_a_request_that_is_lost_costs_its_weight(reward: str) -> None:
    """Nobody may wait: whoever is sent to the replica that is busy is turned away."""
    earned = []
    for lost in (0.0, 8.0):
        envs = vector_env(1, setting="equal", replicas=2, requests=12, scenes="held-out",
                          reward=reward, weight_lost=lost)  # fmt: skip
        envs.reset(0)
        envs.clusters.plan = envs.clusters.plan._replace(queue=0)
        weight = envs.clusters.counterfactual_costs()
        earned.append(float(envs.step(np.array([0])).reward[0]))
    if reward == "latency":
        assert earned[0] - earned[1] == pytest.approx(8.0 / 20.0, abs=1e-6)
    else:  # both replicas turn it away: each choice costs 8, and none is better than the mean
        np.testing.assert_allclose(weight, 8.0)
        assert earned == [0.0, 0.0]


def test_latency_rewards_sum_to_weighed_latencies() -> None:
    envs = vector_env(1, setting="equal", scenes="held-out", weight_first=3.0, **SMALL)
    envs.reset(0)
    total, over, scene = 0.0, False, draw_scenario(envs.setting, held_out(1)[0])
    choices = []
    while not over:
        choices.append(len(choices) % 4)
        step = envs.step(np.array([choices[-1]]))
        total, over = total + float(step.reward[0]), bool(step.terminated[0])
    times = replay(scene.cluster, scene.workload, choices).requests.times
    until = times[[f.Q_FINISHED, f.Q_FIRST_TOKEN]] - times[f.Q_ARRIVAL]
    assert total == pytest.approx(-(until[0] + 3.0 * until[1]).sum() / 20.0, rel=1e-5)


@pytest.mark.parametrize("weights", [(-1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (1.0, math.inf, 0.0)])
def test_weights_that_say_nothing_are_refused(weights: tuple[float, float, float]) -> None:
    end, first, lost = weights
    with pytest.raises(InputError, match="weights"):
        vector_env(1, weight_end=end, weight_first=first, weight_lost=lost)


def test_scenes_of_fewer_replicas_leave_places_free() -> None:
    """Places that are not taken cannot be chosen, and the others are seen as if there were none."""
    setting = make_setting("speeds", replicas=6, fewest=2, requests=40)
    seeds = held_out(8)
    many = VectorClusters(setting, 8)
    for c, seed in enumerate(seeds):
        many.begin(c, draw_scenario(setting, seed), seed)
    sizes = [len(draw_scenario(setting, seed).cluster) for seed in seeds]
    assert len(set(sizes)) > 2
    many.observe(many.all)
    assert many.observations[2].sum(1).tolist() == sizes
    small = VectorClusters(replace(setting, replicas=sizes[0], fewest=None), 1)
    small.begin(0, draw_scenario(setting, seeds[0]), seeds[0])
    small.observe(small.all)
    for t in range(39):
        many.step(np.array([t % size for size in sizes]))
        small.step(np.array([t % sizes[0]]))
        np.testing.assert_array_equal(many.observations[0][0, : sizes[0]], small.observations[0][0])
        np.testing.assert_array_equal(many.observations[1][0], small.observations[1][0])
    many.step(np.zeros(8, np.int64))
    assert [len(summarize(many.result(c, "")).shares) for c in range(8)] == sizes


def test_somebody_else_crowds_one_replica_and_nobody_is_blamed() -> None:
    """In every scene somebody else sends requests of the first half to one replica. The credit is
    for the choice, not for what was done."""
    envs = vector_env(4, setting="equal", reward="counterfactual", disturbed=1.0, requests=60)
    obs = envs.reset(0)
    for _ in range(30):
        weight = envs.clusters.counterfactual_costs()
        chosen = np.zeros(4, np.int64)
        step = envs.step(chosen)
        own = weight[:, 0] - weight.mean(1)
        np.testing.assert_allclose(step.reward, -np.clip(own / 2.0, -20.0, 20.0), rtol=1e-5)
        obs = step.obs
    where = envs.clusters.requests.ints[:, f.Q_REPLICA, :30]
    assert (where != 0).any()
    late = vector_env(4, setting="equal", reward="counterfactual", disturbed=1.0, requests=60)
    late.reset(0)
    for _ in range(59):
        late.step(np.zeros(4, np.int64))
    assert (late.clusters.requests.ints[:, f.Q_REPLICA, 30:59] == 0).all()
    assert obs["action_mask"].all()
    with pytest.raises(InputError, match="disturbed"):
        vector_env(1, setting="equal", reward="latency", disturbed=0.5)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """Two hundred requests; those of the last third have prompts of 900 tokens."""
    lines = [
        json.dumps({
            "timestamp": 1_000 * i, "input_length": 900 if i >= 140 else 600, "output_length": 20,
            "hash_ids": [i % 5, 100 + i],
        })
        for i in range(200)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_windows_of_a_trace_and_what_is_held_out(recorded: str) -> None:
    setting = make_setting("mixed", trace=recorded, requests=40, load=(0.5, 0.5))
    seen, kept = draw_scenario(setting, 7), draw_scenario(setting, held_out(1)[0])
    assert set(seen.workload.prompt) == {600}
    assert set(kept.workload.prompt) == {900}
    # 64-token blocks of the setting are eighths of Mooncake's
    assert max(r.cache for r in seen.cluster.replicas) <= 2_000 // 8
    speeds = sum(r.speed for r in seen.cluster.replicas)
    twice = draw_scenario(replace(setting, load=(1.0, 1.0)), 7)
    assert twice.workload.rate == pytest.approx(2.0 * seen.workload.rate)
    assert seen.workload.rate < 20.0 * speeds
    envs = vector_env(3, setting="mixed", trace=recorded, requests=40)
    envs.reset(0)
    hits = 0.0
    for _ in range(40):
        step = envs.step(np.zeros(3, np.int64))
        hits = max(hits, float(step.obs["replicas"][:, 0, REPLICA.index("hit")].max()))
    assert hits > 0.3
    with pytest.raises(InputError, match="a scene takes 100"):
        draw_scenario(replace(setting, requests=100), held_out(1)[0])


def test_a_replica_that_is_down_is_no_part_of_the_mean() -> None:
    """Two replicas, one is down: the other is the mean, and earns nothing by it."""
    envs = vector_env(4, setting="equal", replicas=2, reward="counterfactual", failing=1.0,
                      requests=60)  # fmt: skip
    obs, seen = envs.reset(0), 0
    for _ in range(59):
        mask = obs["action_mask"]
        step = envs.step(mask.argmax(1))
        alone = mask.sum(1) == 1
        seen += int(alone.sum())
        np.testing.assert_array_equal(step.reward[alone], 0.0)
        obs = step.obs
    assert seen


def test_a_step_is_resumed_bit_for_bit() -> None:
    envs, again = (vector_env(2, setting="mixed", **SMALL) for _ in range(2))
    envs.reset(3)
    again.reset(4)
    rng = np.random.default_rng(0)
    for _ in range(25):
        envs.step(rng.integers(0, 4, 2))
    arrays, data = envs.save()
    again.load(arrays, json.loads(json.dumps(data)))
    for _ in range(60):  # into the next episode
        action = rng.integers(0, 4, 2)
        one, other = envs.step(action), again.step(action)
        np.testing.assert_array_equal(one.reward, other.reward)
        for key in one.obs:
            np.testing.assert_array_equal(one.obs[key], other.obs[key])


def test_the_best_choice_earns_more_than_the_mean_and_the_worst_less() -> None:
    envs = vector_env(2, setting="mixed", reward="counterfactual", **SMALL)
    envs.reset(0)
    for _ in range(10):  # until replicas differ
        envs.step(np.array([0, 1]))
    worst, best = (pick(envs.clusters.counterfactual_costs(), 1) for pick in (np.argmax, np.argmin))
    arrays, data = envs.save()
    assert (envs.step(best).reward > 0).all()
    envs.load(arrays, data)
    assert (envs.step(worst).reward < 0).all()


def test_a_replica_that_is_down_cannot_be_chosen() -> None:
    envs = vector_env(8, setting="equal", failing=1.0, requests=60)
    obs, down = envs.reset(0), 0
    rng = np.random.default_rng(0)
    for _ in range(60):
        down += int((~obs[MASK]).sum())
        assert obs[MASK].any(1).all()
        legal = [rng.choice(np.flatnonzero(mask)) for mask in obs[MASK]]
        step = envs.step(np.array(legal))
        obs = step.obs
    assert down > 8  # a tenth of sixty decisions, in every cluster, about
    setting = make_setting("equal", failing=1.0, requests=60)
    whole = [draw_scenario(setting, seed) for seed in range(5)]
    assert all(len(scene.conditions.failures) == 2 for scene in whole)


def test_a_heuristic_can_be_shown(tmp_path: Path) -> None:
    """Recorded, imitated, and the KL from it measured, by what the core has for demonstrations."""
    demos = str(tmp_path / "demos")
    heuristic = "keel.apps.serving.observations:local_count"
    assert main(["demos", "record", "serving", "--policy", heuristic,
                 "--episodes", "2", "--out", demos]) == 0  # fmt: skip
    assert main(["train", "serving", "--runs", str(tmp_path), "--name", "r", "--quiet",
                 "--total-steps", "256", "--rollout-steps", "16", "--envs.num", "8",
                 "--envs.options", "setting=mixed,requests=40", "--demos.path", demos,
                 "--evaluation.episodes", "2", "--region.minibatch", "64"]) == 0  # fmt: skip
    lines = (tmp_path / "r" / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["train/kl_demos"] >= 0.0


def test_training_never_sees_what_is_held_out() -> None:
    rng = np.random.default_rng(0)
    from keel.apps.serving.settings import training_seed

    assert max(training_seed(rng) for _ in range(1_000)) < min(held_out(3))


def test_a_scorer_is_the_agents_own_network() -> None:
    config = from_dict({"env": "serving", "network": {"kind": "items", "activation": "relu"},
                        "envs": {"options": "setting=mixed,requests=40"}})  # fmt: skip
    envs = make_envs("serving", 3, seed=0, env_kwargs={"setting": "mixed", "requests": 40})
    obs = envs.reset(0)
    agent = agent_for(config, envs, 0)
    params = agent.initial + 0.3 * torch.randn(
        agent.initial.shape, generator=torch.Generator().manual_seed(0)
    )
    tree = {name: x.numpy() for name, x in agent.named(params).items()}
    scorer = make_scorer(tree, "relu")
    seen = {key: torch.from_numpy(x) for key, x in obs.items() if key != MASK}
    policy = agent.policy(params, seen | {MASK: torch.from_numpy(obs[MASK])})
    theirs = policy["logits"].log_softmax(-1).numpy()
    own = scorer(obs["replicas"], obs["request"])
    own = own - np.log(np.exp(own).sum(-1, keepdims=True))
    np.testing.assert_allclose(own, theirs, atol=1e-5)


def test_where_nothing_can_be_won_it_says_so() -> None:
    found = evaluate_routers(
        make_setting("fixed", requests=150), held_out(3), ("round-robin", "local-count")
    )
    room = headroom(found)
    assert room.verdict == "nothing to win here"
    mixed = evaluate_routers(
        make_setting("mixed", requests=150), held_out(4), ("round-robin", "random")
    )
    assert headroom(mixed).verdict == "something to win"
    assert gain(mixed["round-robin"], mixed["round-robin"]).gain == 0.0


def test_each_clairvoyant_is_the_best_at_its_own() -> None:
    found = evaluate_routers(
        make_setting("mixed", requests=150), held_out(4), ("cache-work-by-speed",)
    )
    ends, firsts = found["clairvoyant"], found["clairvoyant-first"]

    def mean(reports: list[Report], of: str) -> float:
        return float(np.mean([getattr(r, of).mean for r in reports]))

    assert mean(firsts, "ttft") < 0.9 * mean(ends, "ttft")
    assert mean(ends, "end_to_end") < mean(firsts, "end_to_end")
    room = headroom(found, "ttft_p99")
    assert room.clairvoyant == pytest.approx(np.mean([r.ttft.p99 for r in firsts]))
    assert headroom(found).clairvoyant == pytest.approx(mean(ends, "end_to_end"))


def test_a_trained_router_goes_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "serving", "--runs", str(tmp_path), "--name", "r", "--quiet",
             "--total-steps", "512", "--rollout-steps", "16", "--envs.num", "8",
             "--envs.options", "setting=mixed,reward=counterfactual,requests=40",
             "--evaluation.episodes", "2", "--region.minibatch", "64"]  # fmt: skip
    assert main(words) == 0
    capsys.readouterr()
    assert main(["serving", "judge", str(tmp_path / "r"), "--seeds", "3", "--requests", "60",
                 "--no-clairvoyant", "--json"]) == 0  # fmt: skip
    told = json.loads(capsys.readouterr().out)
    assert set(told["routers"]) >= {"policy", "round-robin", "cache-work"}
    assert {x["measure"] for x in told["gains"]} == {"end_to_end", "ttft_p99"}


def test_headroom_of_a_trace_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.csv"
    rows = "".join(f"{i * 0.2},{200 + i % 7 * 150},{20 + i % 5 * 30}\n" for i in range(80))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    pictures = tmp_path / "new" / "pictures"
    command = ["serving", "headroom", "--trace", str(trace), "--png"]
    assert main([*command, str(pictures)]) == 0
    assert "to win, on one trace" in " ".join(capsys.readouterr().out.split())
    assert (pictures / "latencies.png").stat().st_size > 10_000
    assert (pictures / "timeline-round-robin.png").stat().st_size > 10_000
    assert main([*command, str(trace)]) == 2
    assert f"--png {trace}: cannot be made a folder: File exists" in capsys.readouterr().err


def test_replaying_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = closed_form("llama-2-7b-a100")
    np.savez(
        tmp_path / "t.npz",
        linear_ms_per_layer=tables.linear,
        decode_attention_ms_per_layer=tables.decode,
        prefill_attention_ms_per_layer=tables.prefill,
        layers=tables.layers,
        grouped_query=tables.grouped,
        num_blocks=tables.blocks,
    )
    scene = draw_scenario(make_setting("equal", requests=50), 0)
    played = simulate(equal_cluster(tables, 4), scene.workload, "round-robin").requests
    rows = [
        f"{played.times[f.Q_ARRIVAL, i]!r},{scene.workload.prompt[i]},{scene.workload.output[i]},"
        f"{i % 4},{played.times[f.Q_FIRST_TOKEN, i] - played.times[f.Q_ARRIVAL, i]!r},"
        f"{played.times[f.Q_FINISHED, i] - played.times[f.Q_ARRIVAL, i]!r},0"
        for i in range(50)
    ]
    text = "arrival_s,prompt_tokens,output_tokens,replica,ttft_s,e2e_s,restarts\n"
    results = tmp_path / "r.csv"
    results.write_text(text + "\n".join(rows).replace("np.float64(", "").replace(")", "") + "\n")
    words = ["serving", "replay", str(results), "--tables", str(tmp_path / "t.npz"), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["max_relative_error"] < 1e-9
    assert main([*words[:3], "--tables", str(results)]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"load": (0.0, 1.0)}, "above 0"), ({"speed": (2.0, 1.0)}, "low ≤ high"),
     ({"replicas": 0}, "at least one replica"), ({"spped": (1.0, 1.0)}, "did you mean")],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_setting("mixed", **changes)


def test_reports_are_plain_data() -> None:
    scene = draw_scenario(make_setting("equal", requests=30), 1)
    report = summarize(simulate(scene.cluster, scene.workload, "random"))
    json.dumps(report.to_dict(), allow_nan=False)


# --- the reward of measured throughput ------------------------------------------------------------


def test_the_original_figures_are_those_of_an_empty_metric_store() -> None:
    """0.1 requests a second and 0.3 · 2 s, the program's fallback: 0.1 − 0.5 · 0.6/2 = −0.05,
    0.3 · sigmoid(−1.4) = 0.0593, tanh(−0.7 · 0.05 − 0.0593) = −0.094, as the original log has it,
    and 0.1/0.05 − 0.1 · 0.6/6 = 1.99, as it expects."""
    at = cold_start_metrics(BEFORE, 1)
    assert at[:, 0].tolist() == pytest.approx([0.1, 0.6, 0.0])
    found, memory = compute_reward(BEFORE, *at, initial_state(1))
    assert found.absolute_score[0] == pytest.approx(-0.05)
    assert found.logistic_penalty[0] == pytest.approx(0.0593, abs=5e-5)
    assert found.delta_score[0] == 0.0
    assert found.total_reward[0] == pytest.approx(-0.094, abs=5e-4)
    assert at[0, 0] / 0.05 - 0.1 * at[1, 0] / 6.0 == pytest.approx(1.99)
    after, _ = compute_reward(AFTER, *at, memory)
    assert after.absolute_score[0] == pytest.approx(0.99)  # the target is floored at 0.1
    assert after.total_reward[0] > 0.6


def test_a_cold_start_is_one_reward_whatever_is_chosen() -> None:
    options = {"setting": "light-load", "reward": "throughput", "version": "before", "requests": 30}
    rewards = []
    for unpaid in (0, 10):
        envs = vector_env(2, cold_start=True, unpaid=unpaid, **options)
        envs.reset(0)
        rewards.append(np.array([envs.step(np.array([0, i % 4])).reward for i in range(30)]))
    np.testing.assert_allclose(rewards[0], -0.0941, atol=5e-5)
    unpaid_rows = np.arange(1, 31) % 10 == 0
    np.testing.assert_array_equal(rewards[1][unpaid_rows], 0.0)
    np.testing.assert_array_equal(rewards[1][~unpaid_rows], rewards[0][~unpaid_rows])
    with pytest.raises(InputError, match="unpaid: expected a number of decisions"):
        vector_env(1, unpaid=-1, **options)


def test_the_preset_before_has_the_original_values() -> None:
    config = preset("router-collapse")
    options = named_values(config.envs.options, "envs.options")
    assert config.explore.entropy_coef == 0.15
    assert config.explore.entropy_floor is None
    assert config.region.kl_coef == 0.0
    assert (config.region.clip, config.region.epochs) == (0.15, 8)
    assert options == {
        "setting": "light-load", "reward": "throughput", "version": "before", "cold_start": True,
    }  # fmt: skip
    envs = vector_env(1, **options)
    envs.reset(0)
    assert envs.setting.interval == (0.0, 0.0)  # the program reads its replicas directly


def test_the_delta_is_the_change_over_its_average() -> None:
    """From 1 to 2 requests a second the average is 1.1, latency from 2 to 1 leaves 1.9."""
    _, memory = compute_reward(AFTER, np.ones(1), np.full(1, 2.0), np.zeros(1), initial_state(1))
    found, _ = compute_reward(AFTER, np.full(1, 2.0), np.ones(1), np.zeros(1), memory)
    assert found.delta_score[0] == pytest.approx(0.3 / 1.1 + 0.2 / 1.9)


@pytest.mark.parametrize(
    ("latency", "penalty"),
    [(1.0, 0.0), (2.0, 0.0), (3.0, 5.0 * (1.0 - math.exp(-1.0))), (2.0 + math.log(2.0), 2.5)],
)
def test_the_penalty_on_late_tokens_by_hand(latency: float, penalty: float) -> None:
    """scale·(1 − e^−(latency − threshold)) above the threshold; in the old rules 5 and 2 s."""
    at = (np.full(1, 0.5), np.full(1, latency), np.full(1, 2.0))
    found, _ = compute_reward(BEFORE, *at, initial_state(1))
    assert found.latency_threshold_penalty[0] == pytest.approx(penalty)
    instant, _ = compute_reward(replace(BEFORE, mode="instant"), *at, initial_state(1))
    expected = math.tanh((0.5 - latency - 0.03 * 2.0 - penalty) / 3.0)
    assert instant.total_reward[0] == pytest.approx(expected)
    softer, _ = compute_reward(replace(BEFORE, latency_penalty_scale=0.5), *at, initial_state(1))
    assert softer.latency_threshold_penalty[0] == pytest.approx(penalty / 10.0)
    assert softer.total_reward[0] == found.total_reward[0]  # `hybrid` does not subtract it


def test_the_legacy_reward_of_changes_by_hand() -> None:
    """From 1 to 2 requests a second, from 7 to 8 seconds, over a threshold of 6: 1 − 1 − 0.5·(1 −
    e^−2)."""
    rules = replace(AFTER, mode="delta")
    first, memory = compute_reward(
        rules, np.ones(1), np.full(1, 7.0), np.zeros(1), initial_state(1)
    )
    assert first.total_reward[0] == pytest.approx(math.tanh(-0.5 * (1.0 - math.exp(-1.0)) / 3.0))
    found, _ = compute_reward(rules, np.full(1, 2.0), np.full(1, 8.0), np.zeros(1), memory)
    assert found.total_reward[0] == pytest.approx(math.tanh(-0.5 * (1.0 - math.exp(-2.0)) / 3.0))
    with pytest.raises(InputError, match="mode: 'instnat' is not one of hybrid, instant"):
        replace(AFTER, mode="instnat")


def test_a_target_that_follows_leaves_nothing_to_gain_by_it() -> None:
    rules = replace(AFTER, adaptive_target=True)
    found, _ = compute_reward(rules, np.full(1, 5.0), np.zeros(1), np.zeros(1), initial_state(1))
    assert found.absolute_score[0] == pytest.approx(1.0)


def test_the_throughput_reward_in_an_environment_and_its_columns() -> None:
    envs = vector_env(2, setting="light-load", reward="throughput", version="before", requests=30)
    envs.reset(0)
    total = np.zeros(2)
    for _ in range(30):
        step = envs.step(np.array([0, 3]))
        total += step.reward
    told = step.episode_measures
    np.testing.assert_allclose(told["total_reward"] * 30, total, rtol=1e-5)
    assert told["action_replica_0"].tolist() == [1.0, 0.0]
    assert told["action_replica_3"].tolist() == [0.0, 1.0]
    assert {"absolute_score", "delta_score", "logistic_penalty"} <= set(told)
    with pytest.raises(InputError, match="version: 'befor' is not one of before, after"):
        vector_env(1, version="befor")
    legacy = vector_env(1, setting="light-load", mode="instant", latency_penalty_scale=1.5)
    assert (legacy.reward_rules.mode, legacy.reward_rules.latency_penalty_scale) == ("instant", 1.5)


def test_the_names_of_version_0_1_mean_the_same() -> None:
    old = vector_env(1, setting="note-004", reward="note-004", note="before")
    new = vector_env(1, setting="light-load", reward="throughput", version="before")
    assert (old.setting, old.reward_kind) == (new.setting, new.reward_kind)
    assert old.reward_rules == new.reward_rules == BEFORE


def test_the_parts_of_a_reward_that_version_0_1_stored_are_read() -> None:
    envs = vector_env(2, setting="light-load", reward="throughput", requests=30)
    envs.reset(0)
    envs.step(np.array([0, 3]))
    arrays, data = envs.save()
    envs.load({**arrays, "parts": arrays["parts"][:-1]}, data)
    np.testing.assert_array_equal(envs.save()[0]["parts"], arrays["parts"])


# --- Gymnasium ------------------------------------------------------------------------------------


def test_clusters_are_a_gymnasium_vector() -> None:
    envs = gymnasium.make_vec("keel/Serving-v0", num_envs=3, setting="mixed", requests=20)
    assert isinstance(envs.unwrapped, ServingVectorEnv)
    obs, info = envs.reset(seed=1)
    assert envs.observation_space.contains(obs)
    assert info["action_mask"].shape == (3, 4)
    for _ in range(20):
        obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
    assert terminated.all()
    assert not truncated.any()
    assert (reward < 0).all()
    assert info["_final_obs"].all()
    again, _ = envs.reset(seed=1)
    other, _ = envs.reset(seed=1)
    np.testing.assert_array_equal(again["replicas"], other["replicas"])

"""`keel bench ppo`: argument errors, the order of measurements and the JSON, with fake workers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from keel.bench import SETTINGS, BenchError, Workers, bench, settings_for
from keel.bench import compare as library
from keel.bench.settings import Algo
from keel.cli import bench as command
from keel.errors import InputError

FAKE = """
import json, os, sys
job = json.loads(sys.argv[1])
name = os.path.basename(__file__)
with open({log!r}, "a") as log:
    log.write(name + " " + str(job["threads"]) + " " + job["mode"] + " "
              + os.environ.get("TORCHINDUCTOR_CACHE_DIR", "-") + "\\n")
rates = {{"run_keel.py": 3000.0, "run_keel_tokens.py": 3000.0, "floor.py": 9000.0}}
rate = rates.get(name, 1000.0 / max(1, job["threads"]))
assert (job["language"] is not None) == (job["algo"] == "tokens")
print("noise that is not an answer")
print(json.dumps({{"steps_per_second": rate, "peak_mb": 100.0, "versions": {{"torch": "2"}},
                  "choices": {{"threads": 1}}, "update_seconds": 600.0 / rate}}))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """A repository whose workers answer at once; the peers' Python is this one."""
    scripts = tmp_path / "benchmarks" / "workers"
    scripts.mkdir(parents=True)
    text = FAKE.format(log=str(tmp_path / "log"))
    for name in (
        "floor.py",
        "run_keel.py",
        "run_sb3.py",
        "run_sbx.py",
        "run_cleanrl.py",
        "run_sb3_contrib.py",
        "run_keel_tokens.py",
        "run_trl.py",
    ):
        (scripts / name).write_text(text)
    python = tmp_path / ".venv-peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    monkeypatch.setattr(library, "cores", lambda: 2)
    return Workers(root=tmp_path)


def log(workers: Workers) -> list[list[str]]:
    return [line.split() for line in (workers.root / "log").read_text().splitlines()]


def test_sides_take_turns_after_floor_and_thread_trials(fake: Workers) -> None:
    bench("ppo", "CartPole-v1", "sb3", repeats=2, workers=fake)
    assert [(name, threads) for name, threads, _, _ in log(fake)] == [
        ("floor.py", "0"),
        ("run_sb3.py", "1"),
        ("run_sb3.py", "2"),
        ("run_keel.py", "0"),
        ("run_sb3.py", "1"),
        ("run_keel.py", "0"),
        ("run_sb3.py", "1"),
    ]


RACER = """
import json, os, sys, time
sys.path.insert(0, {common!r})
from common import Clock, answer, job
work, name = job(), os.path.basename(__file__)
clock = Clock(work)
for index in range(work.warmup + work.iterations):
    clock.tick()
    with open({log!r}, "a") as log:
        log.write(name + " " + str(index) + "\\n")
    time.sleep(0.02)
clock.tick()
answer(clock, [])
"""


def test_two_workers_take_turns_and_the_other_side_is_not_counted(fake: Workers) -> None:
    common = str(Workers().scripts)
    for name in ("run_keel.py", "run_sb3.py"):
        text = RACER.format(common=common, log=str(fake.root / "log"))
        (fake.scripts / name).write_text(text)
    job = settings_for("CartPole-v1").replace(iterations=4, warmup=2, turn=2)
    readings = fake.race(("keel", job), ("sb3", job))
    assert [f"{name} {index}" for name, index in log(fake)] == [
        f"{name} {index}"
        for start in (0, 2, 4)
        for name in ("run_keel.py", "run_sb3.py")
        for index in (start, start + 1)
    ]
    for reading in readings:  # 4 iterations of 1,024 steps, each at least 20 ms
        assert 4 * 1024 / 0.4 < reading.rate <= 4 * 1024 / 0.08
    assert readings[0].wall > 0.2


def test_the_result_holds_medians_ratio_floor_and_peaks(fake: Workers) -> None:
    lines: list[str] = []
    result = bench(
        "ppo", "HalfCheetah-v5", "cleanrl", repeats=3, iterations=2, log=lines.append, workers=fake
    )
    assert (result.ours, result.peer, result.ratio, result.floor) == (3000.0, 1000.0, 3.0, 9000.0)
    assert (result.repeats, result.peer_threads) == (3, 1)
    assert (result.ours_peak_mb, result.peer_peak_mb) == (100.0, 100.0)
    assert result.thread_trials == {"1": 1000.0, "2": 500.0}
    assert result.settings["normalize"] is True
    assert result.settings["iterations"] == 2
    assert len(lines) == 1 + 2 + 1 + 3
    json.dumps(result.__dict__, allow_nan=False)


def test_a_whole_run_is_cold_then_warm_with_caches_of_its_own(fake: Workers) -> None:
    result = bench("ppo", "CartPole-v1", "sbx", repeats=2, whole=2000, workers=fake)
    assert result.mode == "whole"
    assert result.settings["iterations"] == 2  # 2,000 steps rounded up to rollouts of 1,024
    assert result.whole is not None
    assert set(result.whole) == {
        f"{side}_{state}_seconds" for side in ("ours", "peer") for state in ("cold", "warm")
    } | {"ratio_cold", "ratio_warm"}
    runs = [(name, cache) for name, _, mode, cache in log(fake) if mode == "whole"]
    assert [name for name, _ in runs] == ["run_keel.py", "run_sbx.py"] * 4
    caches = [cache for name, cache in runs if name == "run_keel.py"]
    assert caches[0] == caches[1] != caches[2] == caches[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "CartPole-v2"}, "env: 'CartPole-v2' is not one of .* did you mean 'CartPole-v1'"),
        ({"peer": "sb4"}, "peer: 'sb4' is not one of sb3, sbx, cleanrl; did you mean 'sb"),
        ({"repeats": 0}, "repeats: expected at least 1, got 0"),
        ({"iterations": 0}, "iterations: expected at least 1, got 0"),
        ({"whole": -5}, "whole: expected at least 1 step, got -5"),
    ],
)
def test_bad_values_are_named(fake: Workers, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(**{"algo": "ppo", "env": "CartPole-v1", "peer": "sb3", "workers": fake, **arguments})  # type: ignore[arg-type]
    assert not (fake.root / "log").exists()


def test_without_peers_it_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "workers").mkdir(parents=True)
    with pytest.raises(BenchError, match="run `make peers`"):
        bench("ppo", "CartPole-v1", "sb3", workers=Workers(root=tmp_path))


def test_outside_of_the_repository_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="needs a checkout of the repository"):
        bench("ppo", "CartPole-v1", "sb3", workers=Workers(root=tmp_path))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('no module named sbx')", "status 1 .*: no module named sbx"),
        ("print('done')", "status 0 and gave no result: nothing on its standard error"),
        ("print('[1, 2]')", "status 0 and gave no result"),
    ],
)
def test_a_worker_that_gives_no_result_is_one_line(
    fake: Workers, script: str, message: str
) -> None:
    (fake.scripts / "run_sbx.py").write_text(script)
    with pytest.raises(BenchError, match=message):
        fake.run("sbx", settings_for("CartPole-v1"))


def test_the_command_prints_json_or_a_table(
    fake: Workers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "Workers", lambda: fake)
    assert command.run(["ppo", "--peer", "sb3", "--repeats", "1", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert {"ours", "peer", "ratio", "repeats", "floor", "ours_peak_mb", "peer_peak_mb"} <= set(
        answer
    )
    assert "1/1: keel 3,000, sb3 1,000 steps/s, 3.00×" in captured.err
    assert command.run(["ppo", "--whole", "1024", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "of the floor" in text
    assert "a whole run of 1,024 steps, cold: keel" in text


def test_the_command_without_a_name_helps_and_with_a_wrong_one_suggests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.run([]) == 0
    assert "keel bench ppo --help" in capsys.readouterr().out
    with pytest.raises(
        InputError, match="bench: 'pppo' is not one of ppo, trpo, tokens; did you mean 'ppo'"
    ):
        command.run(["pppo"])


@pytest.mark.parametrize(("algo", "name"), [(a, env) for a, s in SETTINGS.items() for env in s])
def test_every_setting_splits_into_whole_minibatches(algo: Algo, name: str) -> None:
    settings = settings_for(name, algo=algo)
    assert (settings.algo, settings.env) == (algo, name)
    assert settings.batch % settings.minibatch == 0


def test_trpo_stands_beside_sb3_contrib_and_tells_the_update_alone(fake: Workers) -> None:
    result = bench("trpo", "HalfCheetah-v5", "sb3-contrib", repeats=2, workers=fake)
    assert {name for name, *_ in log(fake)} == {"floor.py", "run_keel.py", "run_sb3_contrib.py"}
    assert result.settings["algo"] == "trpo"
    assert result.updates == {"ours": 0.2, "peer": 0.6, "ratio": pytest.approx(3.0)}


def test_each_algorithm_has_its_own_peers(fake: Workers) -> None:
    with pytest.raises(InputError, match=r"peer: .*sb3-contrib"):
        bench("trpo", "HalfCheetah-v5", "sbx", workers=fake)
    with pytest.raises(InputError, match="env"):
        bench("trpo", "CartPole-v1", "sb3-contrib", workers=fake)


def test_tokens_stand_beside_trl_without_a_floor(fake: Workers) -> None:
    lines: list[str] = []
    result = bench("tokens", "qwen3-0.8m", "trl", repeats=2, log=lines.append, workers=fake)
    assert [(name, threads) for name, threads, _, _ in log(fake)] == [
        ("run_trl.py", "1"),
        ("run_trl.py", "2"),
        *[("run_keel_tokens.py", "0"), ("run_trl.py", "1")] * 2,
    ]
    assert (result.floor, result.floor_details, result.ratio) == (None, {}, 3.0)
    assert result.settings["language"]["beta"] == 0.01
    assert "1/2: keel 3,000, trl 1,000 tokens/s, 3.00×" in lines
    json.dumps(result.__dict__, allow_nan=False)


def test_whole_runs_of_tokens_are_measured_too(fake: Workers) -> None:
    result = bench("tokens", "qwen3-0.8m", "trl", repeats=1, whole=5000, workers=fake)
    assert result.settings["iterations"] == 2  # batches of 3,072 tokens
    assert [name for name, _, mode, _ in log(fake) if mode == "whole"] == [
        "run_keel_tokens.py",
        "run_trl.py",
    ] * 2


def test_the_command_counts_tokens(
    fake: Workers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "Workers", lambda: fake)
    assert command.run(["tokens", "--peer", "trl", "--repeats", "1"]) == 0
    text = capsys.readouterr().out
    assert "GRPO on qwen3-0.8m: 8 prompts × 8 answers of 48 tokens, β 0.01" in text
    assert "tokens/s" in text
    assert "3.00× trl" in text
    assert command.run(["tokens", "--model", "qwen3-0.8m", "--repeats", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["floor"] is None


def test_the_overhead_is_told_as_far_as_it_is_known(
    fake: Workers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "Workers", lambda: fake)
    script = fake.scripts / "run_keel_tokens.py"
    script.write_text(
        script.read_text().replace('"choices"', '"overhead": {"certify": 0.07}, "choices"')
    )
    assert command.run(["tokens", "--repeats", "1"]) == 0
    assert "of keel's iterations: 7.0% exact KL and its company\n" in capsys.readouterr().out


def test_the_model_has_800_thousand_parameters_and_the_batch_is_its_prompts() -> None:
    settings = settings_for("qwen3-0.8m", algo="tokens")
    m = settings.language
    assert m is not None
    width, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    attention = m.hidden * (width + 2 * kv) + width * m.hidden + 2 * m.head_dim
    layer = attention + 3 * m.hidden * m.intermediate + 2 * m.hidden
    assert m.vocabulary * m.hidden + m.layers * layer + m.hidden == 800_128
    assert m.prompts * m.group == settings.num_envs
    assert settings.batch == 64 * 48


@pytest.mark.slow
def test_trl_really_generates_every_token() -> None:
    """Its worker counts them itself and refuses to answer if one is missing."""
    workers = Workers()
    if not (workers.root / ".venv-peers" / ".ready").exists():
        pytest.skip("the peers are not installed: make peers")
    job = settings_for("qwen3-0.8m", algo="tokens").replace(iterations=1, warmup=1, threads=1)
    reading = workers.run("trl", job)
    assert reading.details["parameters"] == 800_128
    assert reading.rate > 0
    assert reading.details["generate_seconds"] > 0
    assert set(reading.versions) == {"trl", "transformers", "torch"}


def test_both_sides_can_have_the_same_environments(fake: Workers) -> None:
    assert bench("ppo", "CartPole-v1", "sb3", repeats=1, workers=fake).settings["backend"] == "auto"
    same = bench("ppo", "CartPole-v1", "sb3", repeats=1, backend="sync", workers=fake)
    assert same.settings["backend"] == "sync"
    with pytest.raises(InputError, match=r"backend: 'syn' is not one of auto, sync, envpool"):
        bench("ppo", "CartPole-v1", "sb3", backend="syn", workers=fake)  # type: ignore[arg-type]


@pytest.mark.parametrize(("env", "peer"), [("Breakout", "sb3"), ("HalfCheetah-v5", "cleanrl")])
def test_envpool_on_both_sides_is_refused_where_the_peer_has_none(
    fake: Workers, env: str, peer: str
) -> None:
    same = bench("ppo", "HalfCheetah-v5", "sb3", repeats=1, backend="envpool", workers=fake)
    assert same.settings["backend"] == "envpool"
    with pytest.raises(InputError, match=f"EnvPool on both sides needs .* got {peer} on {env}"):
        bench("ppo", env, peer, repeats=1, backend="envpool", workers=fake)

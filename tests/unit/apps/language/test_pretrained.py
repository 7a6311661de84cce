"""Models from folders: opened as data alone, and found from any working directory."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.apps.language.config import Language, Model, from_dict
from keel.apps.language.inspect import judge_run
from keel.apps.language.models import make_model
from keel.apps.language.pretrained import conversion, load_pretrained
from keel.apps.language.tokenizer import build_tokenizer
from keel.errors import InputError
from keel.tracking.record import read_config
from keel.training.runner import resume, start


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small model as `save_pretrained` writes it."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_tokenizer()
    settings = Model(hidden=16, layers=1, heads=2)
    make_model(Language(model=settings), len(tokenizer), 0).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be changed."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_model_of_safetensors_is_opened(folder: Path) -> None:
    model, tokenizer = load_pretrained(folder)
    assert model.config.hidden_size == 16
    assert tokenizer.eos_token_id is not None


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_pickled_weights_are_refused_with_the_command_that_converts_them(
    folder: Path, tmp_path: Path, name: str
) -> None:
    canary = tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    torch.save({"x": Canary(canary)}, folder / name)
    with pytest.raises(InputError, match="has no weights as safetensors") as caught:
        load_pretrained(folder)
    assert not canary.exists()
    assert "use_safetensors=False).save_pretrained(" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_conversion_command_makes_a_folder_that_is_opened(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    # what `conversion` prints, in this process
    AutoModelForCausalLM.from_pretrained(str(folder), use_safetensors=False).save_pretrained(
        str(folder)
    )
    converted, _ = load_pretrained(folder)
    assert all(map(torch.equal, model.parameters(), converted.parameters()))


def test_a_pickled_adapter_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(InputError, match=r"the adapter in .* has no adapter_model\.safetensors"):
        load_pretrained(folder)


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_python_code_of_a_model_is_never_run(folder: Path, tmp_path: Path, place: str) -> None:
    """Not even asked about: transformers would read the answer from the terminal."""
    canary = tmp_path / "canary"
    (folder / "own_code.py").write_text(
        f"from pathlib import Path\nPath({str(canary)!r}).touch()\n"
        "class Own: pass\nclass OwnTokenizer: pass\n"
    )
    data = json.loads((folder / place).read_text())
    data["model_type"] = "own_architecture"
    data["tokenizer_class"] = "OwnTokenizer"
    data["auto_map"] = {
        "AutoConfig": "own_code.Own",
        "AutoModelForCausalLM": "own_code.Own",
        "AutoTokenizer": ["own_code.OwnTokenizer", None],
    }
    (folder / place).write_text(json.dumps(data))
    try:
        load_pretrained(folder)
    except InputError as error:
        assert "auto_map" in str(error)  # noqa: PT017
    else:
        assert place == "tokenizer_config.json"  # transformers has a tokenizer for this folder
    assert not canary.exists()


def edit(folder: Path, **settings: Any) -> None:
    place = folder / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | settings))


@pytest.mark.parametrize("within", ["", "text_config"])
def test_attention_that_is_fetched_as_code_is_refused(folder: Path, within: str) -> None:
    fetched = {"_attn_implementation": "somebody/attention"}
    edit(folder, **({within: fetched} if within else fetched))
    with pytest.raises(InputError, match="fetches code, _attn_implementation somebody/attention"):
        load_pretrained(folder)


def test_a_folder_that_is_damaged_is_told_in_one_line(folder: Path) -> None:
    edit(folder, num_attention_heads=0)
    with pytest.raises(InputError, match=r"model cannot be opened: integer division"):
        load_pretrained(folder)
    edit(folder, num_attention_heads=2)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InputError, match=r"model cannot be opened: .*header"):
        load_pretrained(folder)


def test_the_conversion_command_quotes_the_folder_for_the_shell(tmp_path: Path) -> None:
    name = 'it\'s $(touch x) "a"'
    command = conversion(Path(name)).replace("python -c ", "printf %s ", 1)
    code = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert f"M.from_pretrained({name!r}, " in code
    assert not list(tmp_path.iterdir())


def test_a_relative_model_path_is_found_from_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    config = from_dict(
        {
            "task": "lookup",
            "task_options": "letters=1,facts=4",
            "total_steps": 8,
            "threads": 1,
            "model": {"path": folder.name},
            "sample": {"prompts": 2, "group": 4},
            "region": {"minibatch": 8},
            "warmup": {"examples": 0},
            "evaluation": {"prompts": 4},
            "preflight": False,
        }
    )
    monkeypatch.chdir(tmp_path)
    *_, last = start(config, tmp_path / "runs", "x")
    assert read_config(last.path)["model"]["path"] == str(folder)
    monkeypatch.chdir(elsewhere)
    assert judge_run(last.path, "last", 4, greedy=True)["checkpoint"] == 8
    longer = from_dict({**read_config(last.path), "total_steps": 16})
    *_, last = resume(last.path, longer)
    assert last.steps == 16
    assert dataclasses.asdict(longer)["model"]["path"] == str(folder)

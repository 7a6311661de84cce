"""Models from a folder in the format of Hugging Face, opened without running code from it.

Three things in such a folder can run code: pickled weights (`.bin`), Python files that `auto_map`
names, and attention kernels that are fetched by the name of a repository. All three are refused.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from keel.errors import InputError, import_extra

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")


def load_pretrained(place: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer from a folder of this machine.

    Args:
        place: a folder with `config.json`, weights as safetensors, and a tokenizer.

    Returns:
        The model in float32, and the tokenizer.

    Raises:
        InputError: the folder holds no model, or opening it would run code from it.
    """
    transformers = import_extra("transformers", "language")
    check_folder(place)
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, use_safetensors=True, torch_dtype=torch.float32, **local
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **local)
    except MemoryError:
        raise
    except Exception as error:  # damaged, or of a shape that nobody expects, in many ways
        if "trust_remote_code" in str(error):
            raise InputError(
                f"model.path: {place} needs Python code of its own (auto_map), which Keel never "
                "runs; take a model whose architecture transformers has"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"model.path: {place} cannot be opened: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"model.path: the tokenizer of {place} has no end of text")
    return model, tokenizer


def check_folder(place: Path) -> None:
    """Raise an `InputError` unless a folder holds a model that can be opened as data alone."""
    if not (place / "config.json").is_file():
        raise InputError(f"model.path: {place} holds no model of Hugging Face (config.json)")
    if not any((place / name).is_file() for name in WEIGHTS):
        raise InputError(
            f"model.path: {place} has no weights as safetensors, and pickled ones (.bin) can run "
            f"code when they are opened; convert them, if you trust them: {conversion(place)}"
        )
    if (place / ADAPTER).is_file() and not (place / ADAPTER_WEIGHTS).is_file():
        raise InputError(
            f"model.path: the adapter in {place} has no {ADAPTER_WEIGHTS}, and a pickled one "
            "(.bin) can run code when it is opened; save it anew with safetensors"
        )
    for name, kernel in _attention(_read_json(place / "config.json")):
        if "/" in str(kernel):
            raise InputError(
                f"model.path: {place / 'config.json'} fetches code, {name} {kernel}; remove it"
            )


def _attention(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield every choice of attention, also of a model within a model (`text_config`)."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            if name in ATTENTION:
                yield name, value
            yield from _attention(value)


def conversion(place: Path) -> str:
    """Return the command that writes safetensors beside the pickled weights of a folder."""
    folder = str(place)
    code = (
        "from transformers import AutoModelForCausalLM as M; "
        f"M.from_pretrained({folder!r}, use_safetensors=False).save_pretrained({folder!r})"
    )
    return f"python -c {shlex.quote(code)}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model.path: {path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"model.path: {path}: expected an object")
    return data

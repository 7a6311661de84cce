"""The device that a run computes on."""

from __future__ import annotations

import torch

from keel.errors import InputError

KINDS = ("cpu", "cuda", "mps", "xpu")
"""Kinds of devices that hold numbers and compute with them; torch's `meta`, for one, does not."""


def find_device(name: str) -> torch.device:
    """Return the device of this name, after trying it.

    Args:
        name: `auto` (the first GPU, or the CPU), `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.

    Raises:
        InputError: In one line, where this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type in KINDS:
            torch.ones(1, device=device).sum().item()
    except Exception as error:  # each backend has an error of its own for "not here"
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"device: {name!r} cannot be used ({reason}); cpu always can") from error
    if device.type not in KINDS:
        raise InputError(
            f"device: {name!r} cannot be trained on, expected auto or one of {', '.join(KINDS)}"
        )
    return device

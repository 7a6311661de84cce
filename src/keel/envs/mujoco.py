"""Warnings of MuJoCo, which it would write to a file of its own."""

from __future__ import annotations

import warnings

from keel.envs.faults import EnvWarning


def hear_mujoco() -> None:
    """Turn MuJoCo's warnings, which it writes to MUJOCO_LOG.TXT, into warnings of Python."""
    try:
        import mujoco  # type: ignore[import-untyped]
    except ImportError:
        return  # Gymnasium will say so
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_warn_mujoco)


def _warn_mujoco(text: str) -> None:
    if "deprecated" not in text:  # the model files are Gymnasium's
        warnings.warn(f"MuJoCo: {text}", EnvWarning, stacklevel=2)

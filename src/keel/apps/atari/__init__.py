"""Atari games: videos in color, and the steps to given scores."""

from keel.apps.atari.games import record_game_video
from keel.apps.atari.milestones import MILESTONES, Milestone, milestones

__all__ = ["MILESTONES", "Milestone", "milestones", "record_game_video"]

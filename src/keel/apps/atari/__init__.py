"""Atari games: filmed in colour, and judged by the steps to a score."""

from keel.apps.atari.games import film_game
from keel.apps.atari.milestones import MILESTONES, Milestone, milestones

__all__ = ["MILESTONES", "Milestone", "film_game", "milestones"]

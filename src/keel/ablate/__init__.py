"""Grids of settings × seeds, trained as far as the cores allow, that end in a comparison."""

from keel.ablate.jobs import Job, at_once, failure_lines, run_jobs
from keel.ablate.plan import Cell, Plan, plan_named, read_plan
from keel.ablate.work import Task, check_code, remove_untrained, tasks_of

__all__ = [
    "Cell",
    "Job",
    "Plan",
    "Task",
    "at_once",
    "check_code",
    "failure_lines",
    "plan_named",
    "read_plan",
    "remove_untrained",
    "run_jobs",
    "tasks_of",
]

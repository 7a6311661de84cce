"""Grids of settings × seeds, trained as far as the cores allow, that end in a comparison."""

from keel.ablate.jobs import Job, at_once, run_jobs
from keel.ablate.plan import Cell, Plan, plan_named, read_plan
from keel.ablate.work import Task, tasks_of

__all__ = [
    "Cell",
    "Job",
    "Plan",
    "Task",
    "at_once",
    "plan_named",
    "read_plan",
    "run_jobs",
    "tasks_of",
]

"""Cases: a run that was sick for somebody, diagnosed from its log, cured, trained again."""

from keel.cases.case import FORMS, Case, Shown
from keel.cases.catalogue import CASES, case_named
from keel.cases.running import Outcome, run_case

__all__ = ["CASES", "FORMS", "Case", "Outcome", "Shown", "case_named", "run_case"]

"""The doctor: read-only checks of an installation, one per function.

``examine`` runs the checks and reports each problem once, causes first.
"""

from gpuhook.tools.doctor.before_update import BeforeUpdate
from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.checks import Examination, examine
from gpuhook.tools.doctor.finding import Finding, Status, worst

__all__ = ["BeforeUpdate", "Case", "Examination", "Finding", "Status", "examine", "worst"]

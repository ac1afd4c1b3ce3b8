"""The doctor: what a support engineer would look at, one check per function.

``examine`` looks at a machine and returns findings; nothing here changes anything.
"""

from gpuhook.doctor.case import Case
from gpuhook.doctor.checks import examine
from gpuhook.doctor.finding import Finding, Status, worst

__all__ = ["Case", "Finding", "Status", "examine", "worst"]

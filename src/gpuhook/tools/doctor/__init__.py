"""The doctor: what a support engineer would look at, one check per function.

``examine`` looks at a machine and finds causes first, each once; nothing here changes anything.
"""

from gpuhook.tools.doctor.case import Case
from gpuhook.tools.doctor.checks import Examination, examine
from gpuhook.tools.doctor.finding import Finding, Status, worst

__all__ = ["Case", "Examination", "Finding", "Status", "examine", "worst"]

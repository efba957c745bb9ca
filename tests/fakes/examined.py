"""What the doctor makes of a machine, and its findings by name."""

from __future__ import annotations

from engine.doctor.examine import examine
from engine.doctor.facts import Facts
from engine.doctor.report import Finding, Report


def found(report: Report, name: str) -> Finding:
    """The finding of that name."""
    return next(finding for finding in report.findings if finding.name == name)


def names(report: Report) -> list[str]:
    """What the findings are called."""
    return [finding.name for finding in report.findings]


def exllama(facts: Facts) -> Report:
    """What is said to who wants the exllamav2 backend."""
    return examine(facts, "exllamav2")

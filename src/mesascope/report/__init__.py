"""The report: one page that holds every figure, its claims and where its numbers come from."""

from mesascope.report.page import write_page

__all__ = ["write_page"]

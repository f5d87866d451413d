"""Figures and pages from records: PNG, SVG and self-contained HTML. Knows neither torch nor the lab."""

from sqrtdk.report.files import require_drawable, require_page, save_figure
from sqrtdk.report.kinds import figure_for, figure_kinds
from sqrtdk.report.notebook import figure
from sqrtdk.report.page import render_report, write_report

__all__ = [
    "figure",
    "figure_for",
    "figure_kinds",
    "render_report",
    "require_drawable",
    "require_page",
    "save_figure",
    "write_report",
]

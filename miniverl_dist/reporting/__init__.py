"""report.html, summary.md: what a finished or running run looks like to a person."""

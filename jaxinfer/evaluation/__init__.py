"""Length-graded evaluation: tasks, scoring, comparison of settings, report.  `python -m jaxinfer.eval` runs it."""

"""The report of a job: what its time went to, what failed, and how fast its steps were.

``job_report`` builds it from the run directory. ``job_time`` and ``step_times`` compute, without
I/O. ``report_page`` draws it as HTML with ``report_charts``; ``report_text`` writes Markdown.
"""

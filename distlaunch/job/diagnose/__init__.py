"""From how workers ended and what they last said to the first cause, in words and as data.

``judge.diagnose`` and ``judge.looks_like_consequence`` decide, ``report.render_report`` and ``report.diagnosis_record``
say it. Nothing here is imported before a worker has failed: import them where that happens.
"""

"""Write the generated pages, the manual page and the pictures."""

from __future__ import annotations

from docslib.manual import MANUAL, manual
from docslib.picture import PICTURE, draw_report
from docslib.reference import pages
from docslib.report_picture import TIMELINE, draw_sample_timeline
from docslib.rooms import ROOMS, draw_rooms

for path, text in pages().items():
    path.write_text(text, "utf-8")
    print(f"docs: wrote {path}")
MANUAL.write_text(manual(), "utf-8")
print(f"docs: wrote {MANUAL}")
ROOMS.write_text(draw_rooms(), "utf-8")
print(f"docs: wrote {ROOMS}")
PICTURE.write_text(draw_report(), "utf-8")
print(f"docs: wrote {PICTURE}")
TIMELINE.write_text(draw_sample_timeline(), "utf-8")
print(f"docs: wrote {TIMELINE}")

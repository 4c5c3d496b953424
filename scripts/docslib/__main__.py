"""Write the generated pages and the picture of a failure report."""

from __future__ import annotations

from docslib.picture import PICTURE, draw_report
from docslib.reference import pages

for path, text in pages().items():
    path.write_text(text, "utf-8")
    print(f"docs: wrote {path}")
PICTURE.write_text(draw_report(), "utf-8")
print(f"docs: wrote {PICTURE}")

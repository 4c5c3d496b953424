from types import SimpleNamespace

from distlaunch.console.lines import PARTIAL_S, PROGRESS_S, LineSplitter


class View:
    def __init__(self):
        self.shown = []

    def show_unfinished(self, source):
        self.shown.append((source.rank, bytes(source.buf)))
        source.buf.clear()

    def is_growing(self, source):
        del source
        return False


def test_a_line_is_shown_in_time_although_an_earlier_one_is_held_longer():
    view, live = View(), SimpleNamespace(owner=0, moved_s=0.0)
    lines = LineSplitter(view, live)
    lines.output(1, 1, b"beside live rows", 0.0)
    live.owner = None
    lines.output(2, 1, b"prompt: ", 1.0)
    assert lines.flush_due(1.0) == 1.0 + PARTIAL_S
    assert lines.flush_due(1.0 + PARTIAL_S) == PROGRESS_S
    assert view.shown == [(2, b"prompt: ")]
    assert lines.flush_due(PROGRESS_S) is None
    assert view.shown[1:] == [(1, b"beside live rows")]

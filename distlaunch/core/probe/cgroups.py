"""Where the own process sits in the cgroup trees, version 1, 2 or both.

``/proc/self/cgroup`` names the own directory from the tree's root, ``/proc/self/mountinfo`` where a part of that tree
is mounted: in a container the mounted part usually begins below the root (cgroups(7), "/proc files").
"""

from __future__ import annotations

from distlaunch.core.probe.files import read_text, under

V2 = ""
"""Name of the version 2 tree, as ``/proc/self/cgroup`` writes it."""


class OwnCgroups:
    """The directories that limit this process, read once."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._paths = _own_paths(read_text(under(root, "/proc/self/cgroup")) or "")
        self._mounts = _mounts(read_text(under(root, "/proc/self/mountinfo")) or "")

    def upwards(self, controller: str) -> list[str]:
        """List the own directory and those above it, nearest first, in the controller's tree (``V2``: version 2)."""
        path, mount = self._paths.get(controller), self._mounts.get(controller)
        if path is None or mount is None:
            return []
        top, mounted_at = mount
        inside = _relative(path, top)
        parts = [part for part in inside.split("/") if part]
        return [under(self._root, "/".join([mounted_at.rstrip("/"), *parts[:n]])) for n in range(len(parts), -1, -1)]

    def nearest(self, controller: str, name: str) -> str | None:
        """Return the content of the file ``name`` in the nearest directory that has it."""
        for directory in self.upwards(controller):
            text = read_text(f"{directory}/{name}")
            if text is not None:
                return text
        return None


def _own_paths(text: str) -> dict[str, str]:
    paths: dict[str, str] = {}
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def _mounts(text: str) -> dict[str, tuple[str, str]]:
    """Map each controller to (path of the tree that is mounted, where); the first mount of a tree wins."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        before, found, after = line.partition(" - cgroup")
        if not found:
            continue
        left, right = before.split(), after.split()
        top, mounted_at = left[3], left[4]
        if right[0] == "2":
            mounts.setdefault(V2, (top, mounted_at))
        else:
            for controller in right[-1].split(","):
                mounts.setdefault(controller, (top, mounted_at))
    return mounts


def _relative(path: str, top: str) -> str:
    """Return ``path`` below the mounted ``top``; the mount itself where the path lies elsewhere (``/../x``)."""
    if top == "/":
        return "" if path.startswith("/..") else path
    if path == top or path.startswith(top + "/"):
        return path[len(top) :]
    return ""

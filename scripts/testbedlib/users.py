"""The users that all hosts of a test bed know: root, with a home of the test bed's own, and some
who are odd.

Nothing of the machine's own homes is used: keys, configuration and history of whoever runs the test
stay out of sight.
"""

from __future__ import annotations

import os
import stat
import sys

from testbedlib import kernel

FIRST_ID = 2001
_NO_HOME = "nohome"
_NOISY = "noisy"
SHELLS = {
    "plain": ("/bin/bash",),
    _NOISY: ("/bin/bash",),
    _NO_HOME: ("/bin/bash",),
    "dashuser": ("/bin/dash",),
    "cshuser": ("/bin/tcsh", "/usr/bin/tcsh"),
    "fishuser": ("/usr/bin/fish",),
    "zshuser": ("/usr/bin/zsh", "/bin/zsh"),
    "nologin": ("/usr/sbin/nologin", "/sbin/nologin"),
}
"""The login shell of each user: the first that is installed; a user who has none is left out."""
_NOISE = """\
echo 'Welcome to the cluster! ({0})'
printf '\\033[31m* maintenance on Sunday *\\033[0m\\n'
echo 'warning: quota exceeded ({0})' >&2
stty erase '^H'
alias python=false python3=false
"""
_START_FILES = (".bashrc", ".bash_profile", ".profile")


def present() -> dict[str, str]:
    """Name the users that a test bed on this machine has beside root, and their shells."""
    found = {}
    for name, shells in SHELLS.items():
        for shell in shells:
            if os.access(shell, os.X_OK):
                found[name] = shell
                break
    return found


def install(directory: str) -> None:
    """Show the users to all processes that have this process's mounts, with homes in
    ``DIR/home``."""
    os.mkdir(f"{directory}/home", 0o755)
    os.makedirs(f"{directory}/home/root/.ssh", 0o755)
    ours = present()
    for number, name in enumerate(ours, FIRST_ID):
        if name != _NO_HOME:
            os.mkdir(f"{directory}/home/{name}", 0o755)
            os.chown(f"{directory}/home/{name}", number, number)
    if _NOISY in ours:
        for start_file in _START_FILES:
            with open(f"{directory}/home/{_NOISY}/{start_file}", "w", encoding="ascii") as file:
                file.write(_NOISE.format(start_file))
    for name, (text, mode) in _databases(directory, ours).items():
        source = f"{directory}/home/.{name}"
        with open(source, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(source, mode)
        kernel.bind(source, f"/etc/{name}")
    for path in (sys.prefix, sys.base_prefix, os.path.dirname(os.path.abspath(__file__))):
        _open_the_way_to(path, directory)


def _databases(directory: str, ours: dict[str, str]) -> dict[str, tuple[str, int]]:
    """Return the texts and modes of passwd, group and shadow: the machine's users, too, but root has
    another home."""
    with open("/etc/passwd", encoding="utf-8") as file:
        users = [line.rstrip("\n").split(":") for line in file if line.count(":") == 6]
    users = [user for user in users if user[0] not in ours]
    for user in users:
        if user[0] == "root":
            user[5] = f"{directory}/home/root"
    with open("/etc/group", encoding="utf-8") as file:
        groups = [line.rstrip("\n") for line in file if line.partition(":")[0] not in ours]
    for number, (name, shell) in enumerate(ours.items(), FIRST_ID):
        users.append([name, "x", str(number), str(number), "", f"{directory}/home/{name}", shell])
        groups.append(f"{name}:x:{number}:")
    shadow = [f"{user[0]}:*:19000:0:99999:7:::" for user in users]
    return {
        "passwd": ("\n".join(map(":".join, users)) + "\n", 0o644),
        "group": ("\n".join(groups) + "\n", 0o644),
        "shadow": ("\n".join(shadow) + "\n", 0o600),
    }


def _open_the_way_to(path: str, directory: str) -> None:
    """Make directories on the path that are closed to others, such as /root, passable; their
    contents keep their modes."""
    parent = os.path.dirname(os.path.realpath(path))
    while parent != "/":
        if not os.stat(parent).st_mode & stat.S_IXOTH:
            _open(parent, f"{directory}/open{parent}")
        parent = os.path.dirname(parent)


def _open(closed: str, stand_in: str) -> None:
    os.makedirs(stand_in)
    kernel.mount("tmpfs", stand_in, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    with os.scandir(closed) as entries:
        for entry in entries:
            target = f"{stand_in}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.name == ".ssh":
                continue
            elif entry.is_dir():
                os.mkdir(target)
                kernel.bind(entry.path, target)
            elif entry.is_file():
                with open(target, "w", encoding="ascii"):
                    pass
                kernel.bind(entry.path, target)
    kernel.move(
        stand_in, closed
    )  # nothing below the test bed's directory may lead to what is not the test bed's

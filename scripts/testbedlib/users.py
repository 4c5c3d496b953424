"""The users that all hosts of a test bed know: root, with a home of the test bed's own, and some whose shells are odd.

Nothing of the machine's own homes is used: keys, configuration and history of whoever runs the test stay out of sight.
"""

from __future__ import annotations

import os

from testbedlib import kernel

FIRST_ID = 2001
SHELLS = {
    "plain": ("/bin/bash",),
    "noisy": ("/bin/bash",),
    "dashuser": ("/bin/dash",),
    "cshuser": ("/bin/tcsh", "/bin/csh"),
    "fishuser": ("/usr/bin/fish",),
    "zshuser": ("/usr/bin/zsh", "/bin/zsh"),
}
"""The login shell of each user: the first that is installed; a user who has none is left out."""
_NOISE = "echo 'Welcome to the cluster! {0}'; echo 'warning: quota exceeded in {0}' >&2\n"


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
    """Show the users to all processes that have this process's mounts, with homes in ``DIR/home``."""
    os.mkdir(f"{directory}/home", 0o755)
    os.makedirs(f"{directory}/home/root/.ssh", 0o755)
    with open("/etc/passwd", encoding="utf-8") as file:
        entries = [line.rstrip("\n").split(":") for line in file if line.count(":") == 6]
    ours = present()
    lines = []
    for entry in entries:
        if entry[0] == "root":
            entry[5] = f"{directory}/home/root"
        if entry[0] not in ours:
            lines.append(":".join(entry))
    groups = []
    for number, (name, shell) in enumerate(ours.items(), FIRST_ID):
        home = f"{directory}/home/{name}"
        os.mkdir(home, 0o755)
        os.chown(home, number, number)
        lines.append(f"{name}:x:{number}:{number}::{home}:{shell}")
        groups.append(f"{name}:x:{number}:")
    for start_file in (".bashrc", ".bash_profile", ".profile"):
        with open(f"{directory}/home/noisy/{start_file}", "w", encoding="ascii") as file:
            file.write(_NOISE.format(start_file))
    with open("/etc/group", encoding="utf-8") as file:
        groups += [line.rstrip("\n") for line in file if line.partition(":")[0] not in ours]
    shadow = [f"{line.partition(':')[0]}:*:19000:0:99999:7:::" for line in lines]
    for name, text, mode in (("passwd", lines, 0o644), ("group", groups, 0o644), ("shadow", shadow, 0o600)):
        source = f"{directory}/home/.{name}"
        with open(source, "w", encoding="utf-8") as file:
            file.write("\n".join(text) + "\n")
        os.chmod(source, mode)
        kernel.bind(source, f"/etc/{name}")

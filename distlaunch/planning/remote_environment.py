"""Select the launcher's environment variables for workers on other machines. No I/O.

They get the same variables as workers on this machine, except those of a host or a login. Variables
of a software installation (PATH, CONDA_*) are sent only to nodes that have the launcher's
interpreter at the same path, where the other paths are probably the same too. On other nodes the
launcher's PATH would hide the node's own software.

PYTHONPATH is sent everywhere: it names the user's own modules, and a missing directory does no
harm. PYTHONHOME is not sent, because a wrong one stops every interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distlaunch.core.model.variables import DEVICE_MASKS

_OF_A_HOST = frozenset({
    # user, login and host
    "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "PWD", "OLDPWD", "MAIL", "SHLVL", "_", "HOSTNAME", "HOST",
    "HOSTTYPE", "MACHTYPE", "TTY", "UID", "EUID", "GROUPS", "KRB5CCNAME", "CREDENTIALS_DIRECTORY", "container",
    # the desktop and the terminal (TERM stays: the output comes back to ours)
    "DISPLAY", "WAYLAND_DISPLAY", "WAYLAND_SOCKET", "XAUTHORITY", "ICEAUTHORITY", "SESSION_MANAGER", "DESKTOP_SESSION",
    "WINDOWID", "WINDOWPATH", "GPG_AGENT_INFO", "GPG_TTY", "STY", "WINDOW", "TERMCAP", "LC_TERMINAL",
    "LC_TERMINAL_VERSION",
    # temporary directories
    "TMPDIR", "TMP", "TEMP", "TEMPDIR", "SLURM_TMPDIR", "JOB_TMPDIR",
    # variables of a service manager
    "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET", "MANAGERPID", "MAINPID", "LISTEN_FDS", "LISTEN_PID",
    "LISTEN_FDNAMES", "WATCHDOG_PID", "WATCHDOG_USEC", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE",
    # a step of Slurm, or its node
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_PRIO_PROCESS",
    "SLURM_SUBMIT_HOST", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_LAUNCH_NODE_IPADDR",
    "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_CPUS_ON_NODE", "SLURMD_NODENAME", "SLURM_STEPID", "SLURM_UMASK",
})  # fmt: skip
_OF_A_HOST_BY_PREFIX = (
    "SSH_", "XDG_", "DBUS_", "TMUX", "TERM_PROGRAM", "TERM_SESSION", "VTE_", "KONSOLE_", "GNOME_", "KDE_", "KITTY_",
    "ITERM_", "WEZTERM_", "ALACRITTY_", "GHOSTTY_", "WT_", "WSL", "VSCODE_", "SYSTEMD_", "BASH_FUNC_", "PMI_", "PMIX_",
    "SLURM_STEP_", "SLURM_SRUN_COMM_", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURMD_",
)  # fmt: skip
_MASKS = DEVICE_MASKS | {
    "GPU_DEVICE_ORDINAL",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
}

_OF_AN_INSTALLATION = frozenset({
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONHOME", "PYTHONUSERBASE",
    "PYTHONEXECUTABLE", "BASH_ENV", "ENV",
    # modules that are loaded; without their PATH they would not be
    "LOADEDMODULES", "MODULEPATH", "MODULEPATH_ROOT", "MODULESHOME", "_LMFILES_",
})  # fmt: skip
_OF_AN_INSTALLATION_BY_PREFIX = (
    "CONDA_", "_CONDA_", "_CE_", "MAMBA_", "PYENV_", "LMOD_", "__LMOD", "_ModuleTable", "__MODULES_", "MODULES_",
)  # fmt: skip


class RemoteEnvironment(NamedTuple):
    """The environment of workers on other nodes."""

    everywhere: dict[str, str]
    with_ours: dict[str, str]
    """Variables only for nodes that have the launcher's interpreter at the same path."""


def split_environment(environ: Mapping[str, str]) -> RemoteEnvironment:
    """Split an environment that workers on this machine would inherit."""
    everywhere: dict[str, str] = {}
    with_ours: dict[str, str] = {}
    for name, value in environ.items():
        if name in _OF_AN_INSTALLATION or name.startswith(_OF_AN_INSTALLATION_BY_PREFIX):
            with_ours[name] = value
        elif not (name in _OF_A_HOST or name in _MASKS or name.startswith(_OF_A_HOST_BY_PREFIX)):
            everywhere[name] = value
    return RemoteEnvironment(everywhere, with_ours)

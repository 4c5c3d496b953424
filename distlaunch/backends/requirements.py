"""Whether the modules that a backend's workers import are there, asked without importing any.

This interpreter is asked; ``elsewhere`` asks another.

Whether the modules that workers import are there for another interpreter than ours: it is asked.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from distlaunch.backends.base import Requirement
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.record import Record
from distlaunch.core.probe.python_modules import is_importable

Installed = Callable[[Requirement], tuple[str | None, str]]
"""Gives the version of what has brought a module (as ``Found`` has it), and that package."""


class Found(Record):
    """What became of one requirement."""

    requirement: Requirement
    version: str | None
    """Installed; empty where the module is there without its package's records; None if it is
    missing."""
    package: str
    """The one that has brought it, or would: ``tensorflow-cpu`` has the module of
    ``tensorflow``."""
    release: str = ""
    """The one that it has to be of, if that follows from another package that is there:
    ``2.21``."""

    @property
    def is_met(self) -> bool:
        """Return whether it is there and new enough."""
        return self.version is not None and not self.is_too_old

    @property
    def is_too_old(self) -> bool:
        """Return whether it is there, and older than what works."""
        oldest = self.requirement.at_least
        return bool(self.version and oldest) and _release(self.version or "") < _release(oldest)


def look_for(
    requirements: Sequence[Requirement],
    path: Sequence[str] = (),
    *,
    installed: Installed | None = None,
) -> Iterator[Found]:
    """Look for each of these modules on ``path``, then in this interpreter; or have another told by
    ``installed``."""
    ask = installed or (lambda requirement: _in_ours(requirement, path))
    for requirement in requirements:
        release = ""
        if requirement.beside is not None:
            other = _found(requirement.beside, ask)
            if other.is_too_old:
                continue
            release = ".".join(map(str, _release(other.version or "")[:2]))
        yield _found(requirement, ask, release)


def _found(requirement: Requirement, installed: Installed, release: str = "") -> Found:
    there, name = installed(requirement)
    return Found(requirement=requirement, version=there, package=name, release=release)


def _in_ours(requirement: Requirement, path: Sequence[str]) -> tuple[str | None, str]:
    package = _plain(requirement.package)
    if not is_importable(
        requirement.module, path, folders=False
    ):  # one of the script's own may be called alike
        return None, package
    with suppress(PackageNotFoundError):
        return version(package), package
    others = packages_distributions().get(requirement.module, [])
    return (version(others[0]), others[0]) if others else ("", package)


def _plain(package: str) -> str:
    """Name a package without its extras: ``ray[client]`` is in ``ray``."""
    return package.partition("[")[0]


def install_words(python: str, requirement: Requirement, release: str = "") -> str:
    """Return the command that installs what is missing, or too old."""
    package, oldest = requirement.package, requirement.at_least
    wanted = f"{package}=={release}.*" if release else f"{package}>={oldest}" if oldest else package
    if requirement.variables:
        return f"{requirement.variables} {python} -m pip install --no-build-isolation '{wanted}'"
    return f"{python} -m pip install '{wanted}'"


def check_installed(
    name: str,
    requirements: Sequence[Requirement],
    python: str,
    path: Sequence[str],
    *,
    installed: Installed | None = None,
) -> None:
    """Refuse a backend whose modules the workers could not import. Raises ConfigError with the
    command that helps."""
    for found in look_for(requirements, path, installed=installed):
        requirement = found.requirement
        if found.is_met or not requirement.demanded:
            continue
        why = f"{found.package} {found.version} is older than {requirement.at_least}"
        said = why if found.is_too_old else f"{python} has no module {requirement.module}"
        see = f" ({requirement.see})" if requirement.see else ""
        raise ConfigError(
            f"--backend {name}: {said}",
            hint=f"{install_words(python, requirement, found.release)}{see}",
        )


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of a version up to what is no plain number: ``2.13.0+cpu`` is (2, 13, 0)."""
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


_PATIENCE_S = 10.0
_REAP_S = 0.2
_ASK = """\
import json, sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
path, wanted = json.loads(sys.argv[1])
def there(name):
    finders = [lambda: PathFinder.find_spec(name, path + sys.path[1:])]
    finders += [lambda finder=finder: finder.find_spec(name, None) for finder in sys.meta_path]
    for find in finders:
        try:
            spec = find()
        except Exception:
            continue
        if spec is not None and spec.origin is not None:
            return True
    return False
def release(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
print("\\n" + json.dumps([release(package) if there(name) else None for name, package in wanted]))
"""
"""The counterpart of ``requirements._in_ours``, for Python 3.8 and newer; it imports nothing of
what it looks for."""


def installed_for(
    python: str,
    requirements: Sequence[Requirement],
    path: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: str,
) -> Installed | None:
    """Ask this interpreter, as workers run it; None where it gives no answer: a worker then says
    what is wrong."""
    known = [each for one in requirements for each in (one, one.beside) if each is not None]
    wanted = list(dict.fromkeys(map(_named, known)))
    try:
        child = subprocess.Popen(
            [python, "-c", _ASK, json.dumps([list(path), wanted])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            cwd=cwd,
        )
    except (OSError, ValueError):
        return None
    with child:
        try:
            answer = child.communicate(timeout=_PATIENCE_S)[0]
            found = dict(zip(wanted, json.loads(answer.rstrip().rpartition(b"\n")[2]), strict=True))
        except (subprocess.TimeoutExpired, TypeError, ValueError):
            return None
        finally:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_S)
    return lambda requirement: (found[_named(requirement)], _named(requirement)[1])


def _named(requirement: Requirement) -> tuple[str, str]:
    """Return the module and its package, that without extras."""
    return requirement.module, requirement.package.partition("[")[0]

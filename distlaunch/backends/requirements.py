"""Check that the modules of a backend are installed, without importing them: here, or in the
interpreter of the workers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from distlaunch.backends.base import Requirement
from distlaunch.core.errors import ConfigError
from distlaunch.core.model.option_names import Opt
from distlaunch.core.model.record import Record
from distlaunch.core.probe.python_modules import is_importable

Installed = Callable[[Requirement], tuple[str | None, str]]
"""Returns version and package of an installed module, as in ``Found``."""


class Found(Record):
    """The result for one requirement."""

    requirement: Requirement
    version: str | None
    """The installed version; empty if the package has no metadata; None if the module is
    missing."""
    package: str
    """The package that provides the module, which may be ``tensorflow-cpu`` for ``tensorflow``."""
    release: str = ""
    """The release that the package must have to match another package, as in ``2.21``; empty for
    any."""

    @property
    def is_met(self) -> bool:
        """Whether the module is installed and new enough."""
        return self.version is not None and not self.is_too_old

    @property
    def is_too_old(self) -> bool:
        """Whether the module is installed but older than required."""
        oldest = self.requirement.at_least
        return bool(self.version and oldest) and _parse_release(
            self.version or ""
        ) < _parse_release(oldest)


def find_modules(
    requirements: Sequence[Requirement],
    path: Sequence[str] = (),
    *,
    installed: Installed | None = None,
) -> Iterator[Found]:
    """Yield the result for each requirement, in order.

    The modules are looked for with ``installed``. By default they are looked for on ``path`` and in
    this interpreter. A requirement is left out if the module that it is ``beside`` is too old.
    """
    ask = installed or (lambda requirement: _find_in_this_interpreter(requirement, path))
    for requirement in requirements:
        release = ""
        if requirement.beside is not None:
            other = _check_requirement(requirement.beside, ask)
            if other.is_too_old:
                continue
            release = ".".join(map(str, _parse_release(other.version or "")[:2]))
        yield _check_requirement(requirement, ask, release)


def _check_requirement(requirement: Requirement, installed: Installed, release: str = "") -> Found:
    installed_version, name = installed(requirement)
    return Found(requirement=requirement, version=installed_version, package=name, release=release)


def _find_in_this_interpreter(
    requirement: Requirement, path: Sequence[str]
) -> tuple[str | None, str]:
    package = _without_extras(requirement.package)
    # Folders without __init__ do not count: the script's folder may have one of this name.
    if not is_importable(requirement.module, path, folders=False):
        return None, package
    with suppress(PackageNotFoundError):
        return version(package), package
    others = packages_distributions().get(requirement.module, [])
    return (version(others[0]), others[0]) if others else ("", package)


def _without_extras(package: str) -> str:
    """Return a package's name without extras: ``ray`` for ``ray[client]``."""
    return package.partition("[")[0]


def install_command(python: str, requirement: Requirement, release: str = "") -> str:
    """Return the command that installs a missing or outdated package."""
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
    """Raise ConfigError, with the command that helps, if a demanded module is missing or too
    old."""
    for found in find_modules(requirements, path, installed=installed):
        requirement = found.requirement
        if found.is_met or not requirement.demanded:
            continue
        why = f"{found.package} {found.version} is older than {requirement.at_least}"
        problem = why if found.is_too_old else f"{python} has no module {requirement.module}"
        see = f" ({requirement.see})" if requirement.see else ""
        raise ConfigError(
            f"{Opt.BACKEND(name)}: {problem}",
            hint=f"{install_command(python, requirement, found.release)}{see}",
        )


def _parse_release(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


_TIMEOUT_S = 10.0
_REAP_S = 0.2
_PROGRAM = """\
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
"""Program that does the same as ``_find_in_this_interpreter`` in another interpreter (Python 3.8 or newer)."""


def installed_for(
    python: str,
    requirements: Sequence[Requirement],
    path: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: str,
) -> Installed | None:
    """Ask another interpreter, started as workers are, which modules it has.

    Return a function that knows the answers. Return None if the interpreter does not answer; a
    worker then reports the problem.
    """
    known = [each for one in requirements for each in (one, one.beside) if each is not None]
    wanted = list(dict.fromkeys(map(_module_and_package, known)))
    try:
        child = subprocess.Popen(
            [python, "-c", _PROGRAM, json.dumps([list(path), wanted])],
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
            answer = child.communicate(timeout=_TIMEOUT_S)[0]
            found = dict(zip(wanted, json.loads(answer.rstrip().rpartition(b"\n")[2]), strict=True))
        except (subprocess.TimeoutExpired, TypeError, ValueError):
            return None
        finally:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_REAP_S)
    return lambda requirement: (
        found[_module_and_package(requirement)],
        _module_and_package(requirement)[1],
    )


def _module_and_package(requirement: Requirement) -> tuple[str, str]:
    return requirement.module, requirement.package.partition("[")[0]

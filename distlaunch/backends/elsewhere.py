"""Whether the modules that workers import are there for another interpreter than ours: it is asked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from distlaunch.backends.base import Requirement
from distlaunch.backends.requirements import Installed

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
"""The counterpart of ``requirements._in_ours``, for Python 3.8 and newer; it imports nothing of what it looks for."""


def installed_for(
    python: str, requirements: Sequence[Requirement], path: Sequence[str], *, environ: Mapping[str, str], cwd: str
) -> Installed | None:
    """Ask this interpreter, as workers run it; None where it gives no answer: a worker then says what is wrong."""
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
    """Give the module and its package, that without extras."""
    return requirement.module, requirement.package.partition("[")[0]

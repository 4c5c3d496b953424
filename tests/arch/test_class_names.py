"""No two public classes of the package share a name."""

import ast
from collections import defaultdict
from pathlib import Path

import distlaunch

ROOT = Path(distlaunch.__file__).parent


def test_no_two_public_classes_share_a_name():
    modules = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}

"""Code decides by values: it never compares text that is written for people.

These count as such a comparison outside of the modules that read other programs' texts: a literal
of several words, or of a word and a colon, in ``==``, ``in``, ``startswith``, ``partition``, a
pattern and the like; any comparison of a name that holds words for people (``why``, ``hint``,
``problem``, the message of an error, ...); and the search for something in a name that holds a
text. Members of a ``Literal`` are values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "distlaunch"
READS_FOREIGN_TEXT = {
    "diagnosis": "what torch, NCCL, Python and the kernel print",
    "console/repeated_blocks.py": "tracebacks of workers",
    "core/probe": "files of /proc and /sys, and what nvidia-smi prints",
    "backends/config_file.py": "YAML",
    "transport/ssh/openssh.py": "what ssh prints",
    "transport/slurm": "what srun prints",
    "coordinator/runtime/slurm_agents.py": "what srun prints",
    "launch/slurm.py": "what scontrol prints",
    "planning/clusters": "variables that schedulers set",
    "planning/hosts/hostfile.py": "host files",
}
ALLOWED = {
    (
        "cli/compat/horovodrun/command.py",
        "\"No module named 'horovod'\" in done.stderr",
    ): "Python's words",
    ("transport/ssh/client.py", "'Indecipherable' in str(error)"): "paramiko's words",
    ("transport/ssh/client.py", "'no acceptable' in str(error)"): "paramiko's words",
    ("transport/ssh/client.py", "'Signature verification' in text"): "paramiko's words",
    ("cli/misplaced_options.py", "name in text"): "the user's script",
    (
        "core/agent/workers/stacks.py",
        "_INNERMOST.search(worker.text)",
    ): "faulthandler's words",
    ("core/model/log_limit.py", "notice.startswith(_BEGIN)"): "it is part of the file's format",
    ("core/model/log_limit.py", "notice.endswith(_END)"): "it is part of the file's format",
    ("console/terminal_writer.py", "SEPARATOR in text"): "a line that is too wide is cut there",
    ("coordinator/joined/launcher.py", "note not in self._noted"): "each line is said once",
    ("coordinator/runtime/runner.py", "note not in self._noted"): "each line is said once",
    ("coordinator/policy/node_setup.py", "last == event.problem"): "each line is said once",
    (
        "coordinator/policy/losses.py",
        "loss.why == first.why",
    ): "a line names a reason once that all nodes share",
}
"""Module and comparison, each with its reason. An entry that nothing needs any more is a
failure."""

TESTS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "find",
    "index",
    "split",
    "rsplit",
}
PATTERNS = {"match", "search", "fullmatch", "findall", "finditer"}
FOR_PEOPLE = {
    *(
        "why",
        "why_lost",
        "hint",
        "problem",
        "summary",
        "notice",
        "note",
        "explanation",
    ),
}
"""Names that hold words for people, whatever they are compared with."""
FOR_PEOPLE_OR_NOT = {"message", "reason"}
"""Names that may do so: a comparison with a word counts."""
ERRORS = {"exc", "error", "err", "failure", "trouble", "problem"}
TEXTS = {"text", "said", "summary", "details"}
"""Names of texts: a search in one counts."""
SEVERAL_WORDS = re.compile(r"[A-Za-z']{2,}[,:;]? (?:a )?[A-Za-z']{2,}|^[a-z]{2,}: ?$")
"""Or a prefix of messages, as ``error: ``."""
WORD = re.compile(r"[A-Za-z]{3,}|[a-z]+ ")


class Module:
    """One module: its tree, and the texts behind the names that its body gives to constants."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.tree = ast.parse(source)
        self.constants: dict[str, list[str]] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        keys = isinstance(node.value, ast.Dict)
                        parts = [key for key in node.value.keys if key] if keys else [node.value]
                        self.constants[target.id] = [
                            text for part in parts for text in literals(part)
                        ]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distlaunch."):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (str(node.module), alias.name)


def literals(node: ast.AST) -> list[str]:
    return [
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


class Package:
    def __init__(self, modules: dict[str, str]) -> None:
        self.modules = {name: Module(name, source) for name, source in modules.items()}
        self.values = {
            text for module in self.modules.values() for text in members_of_literals(module.tree)
        }

    def comparisons(self) -> Iterator[tuple[str, str]]:
        """Yield module and expression of each comparison of text for people."""
        for module in self.modules.values():
            if any(
                module.name == part or module.name.startswith(f"{part}/")
                for part in READS_FOREIGN_TEXT
            ):
                continue
            for node in ast.walk(module.tree):
                if (found := self._compared(module, node)) is not None:
                    yield module.name, found

    def _compared(self, module: Module, node: ast.AST) -> str | None:
        if isinstance(node, ast.Compare):
            if not all(
                isinstance(each, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for each in node.ops
            ):
                return None
            parts = [node.left, *node.comparators]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and self._asks(node.func)
        ):
            parts = [node.func.value, *node.args]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        else:
            return None
        texts = [
            text for part in parts for text in self._texts(module, part) if text not in self.values
        ]
        names = {
            name
            for part in parts
            for each in elements(part)
            if (name := last_name(each)) is not None
        }
        if (
            any(SEVERAL_WORDS.search(text) for text in texts)
            or (names & FOR_PEOPLE and not is_emptiness(parts, texts))
            or (isinstance(node, ast.Compare) and searches_text(node))
            or (names & FOR_PEOPLE_OR_NOT and any(WORD.search(text) for text in texts))
        ):
            return ast.unparse(node)
        return None

    @staticmethod
    def _asks(func: ast.Attribute) -> bool:
        return func.attr in TESTS | PATTERNS

    def _texts(self, module: Module, node: ast.AST) -> list[str]:
        found: list[str] = []
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                found.append(each.value)
            elif isinstance(each, ast.Name):
                found += self._constant(module, each.id)
        return found

    def _constant(self, module: Module, name: str) -> list[str]:
        if name in module.imported:
            where, name = module.imported[name]
            path = where.removeprefix("distlaunch.").replace(".", "/") + ".py"
            return self.modules[path].constants.get(name, []) if path in self.modules else []
        return module.constants.get(name, [])


def members_of_literals(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "Literal"
        ):
            yield from literals(node.slice)


def elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]


def last_name(node: ast.expr) -> str | None:
    """Return how the value is called; ``str(exc)`` is called a message, and the message of an error a summary."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return "message" if node.args and last_name(node.args[0]) in ERRORS else None
    if isinstance(node, ast.Attribute) and node.attr == "message":
        return "summary" if last_name(node.value) in ERRORS else "message"
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else None
    )


def searches_text(node: ast.Compare) -> bool:
    """Return whether a word is looked for in a text."""
    return any(
        isinstance(each, ast.In | ast.NotIn)
        and last_name(right) in TEXTS
        and not (isinstance(left, ast.Constant) and not WORD.search(str(left.value)))
        for left, each, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        )
    )


def is_emptiness(parts: list[ast.expr], texts: list[str]) -> bool:
    """Return whether all there is to compare with is the empty text, or an end of line."""
    return any(isinstance(part, ast.Constant) for part in parts) and not "".join(texts).strip()


def comparisons_of(source: str) -> set[tuple[str, str]]:
    """Return what is found in a module that stands among a few real ones."""
    names = ("core/errors.py", "transport/connect_errors.py")
    others = {name: (PACKAGE / name).read_text() for name in names}
    others["core/errors.py"] += "\nLOCKED = 'has a passphrase'\n"
    return set(Package({**others, "coordinator/planted.py": source}).comparisons())


def test_no_module_decides_by_words_for_people():
    sources = {
        str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
    }
    found = list(Package(sources).comparisons())
    new = [each for each in found if each not in ALLOWED]
    assert not new, "give the kind a field or an enum, and let one function word it:\n" + "\n".join(
        map(str, new)
    )
    assert not ALLOWED.keys() - set(found), "these are not there any more"


@pytest.mark.parametrize(
    "planted",
    [
        'return why == "the connection was closed by the peer"',
        'return why.startswith("it ")',
        "return why in _REASONS",
        "return failure.hint == other.hint",
        'return "refused" in str(failure)',
        'return re.fullmatch(r"it ended with status (\\d+)", failure.text)',
        "return failure.text.startswith(_BEGINS)",
        'return any(note.startswith("settled at the start: ") for note in failure.notes)',
        "return LOCKED in failure.text",
        'return failure.message.partition(": ")[2]',
        'return why_text.removeprefix("error: ")',
        "return other in error.message",
        'return "directory" in text',
    ],
)
def test_a_planted_comparison_is_found(planted):
    source = (
        "import re\nfrom distlaunch.core.errors import LOCKED\n"
        "_REASONS = ('silent',)\n_BEGINS = ('Ray has lost ', 'gone')\n\n"
        f"def _planted(why, failure, other, error, text, why_text):\n    {planted}\n"
    )
    assert len(comparisons_of(source)) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        'return why == ""',
        "return why is not None",
        'return failure.step == "host key"',
        'return failure.path.startswith("/proc/self")',
        "return kind is LossKind.GONE",
        'return f"it ended with status {kind}"',
        'return failure.message.split("\\n")',
        "return kind in failure.texts",
    ],
)
def test_a_comparison_of_values_is_none(harmless):
    assert comparisons_of(f"def _planted(why, failure, kind):\n    {harmless}\n") == set()

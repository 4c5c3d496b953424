from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

from distlaunch.__main__ import run
from distlaunch.cli.app import run_app
from distlaunch.cli.commands.jobs import parse_job_command
from distlaunch.cli.commands.jobs_options import JOB_OPTIONS
from distlaunch.cli.commands.render import TARGETS, options_of
from distlaunch.cli.compat.torchrun import command_line
from distlaunch.cli.completions import SHELLS
from distlaunch.cli.help import SUMMARIES
from distlaunch.cli.option_table import PLAN_OPTIONS
from distlaunch.cli.pages import topics
from distlaunch.cli.parser import scan
from distlaunch.core.model.variables import FLIGHT_RECORDER
from tests.pages import DOCS, PAGES, README, ROOT, blocks, name

LINK = re.compile(r"\]\(([^)\s]+)\)")
all_pages = pytest.mark.parametrize("page", PAGES, ids=name)


def parse(words: list[str]) -> None:
    """Parse a command line of distlaunch. Raises UsageError for a refused one."""
    command, rest = words[0], words[1:]
    if command in ("torchrun", "torch.distributed.launch"):
        command_line.parse(rest, {})
    elif command in ("accelerate", "deepspeed", "horovodrun"):
        rest = rest[1:] if command == "accelerate" else rest
        scan(rest, importlib.import_module(f"distlaunch.cli.compat.{command}.options").OPTIONS)
    elif command in JOB_OPTIONS:
        parse_job_command(command, rest, {})
    elif command == "completion":
        assert rest[0] in SHELLS, rest
    elif command == "help":
        assert set(rest) <= {*topics(), "TOPIC", "PAGE"}, rest
    elif command != "backends":
        run = {"train": lambda _: 0, "plan": lambda *_: 0, "render": lambda *_: 0}
        assert run_app(words, {}, **run) == 0


@all_pages
def test_every_block_of_commands_says_how_it_is_tested(page):
    for block in blocks(page):
        assert block.language, f"a block without a language: {block.text[:60]}"
        if block.language == "sh":
            assert re.match(r"run$|run: |needs: .", block.mark), block.text
        if block.mark.startswith("run: "):
            test = ROOT / block.mark.removeprefix("run: ")
            assert page.name in test.read_text("utf-8"), f"{test} does not read {page}"


@all_pages
def test_every_command_of_a_block_is_accepted(page):
    for block in blocks(page):
        if block.language == "sh":
            for words in block.commands():
                if words[1:2] != ["…"]:
                    parse(words)


@all_pages
def test_every_command_in_the_text_names_a_command_and_options_that_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"`(distlaunch [^`]*)`", text):
        words = found.replace("\\|", "|").split()
        if words[1] == "help" or (words[-1].endswith(".py") and "…" not in found):
            parse(words[1:])


@all_pages
def test_blocks_of_python_are_python(page):
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@all_pages
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(re.sub(r"`[^`]*`", "", text)):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_batch_script_on_the_slurm_page_is_what_render_prints(tmp_path, monkeypatch, capsys):
    page = DOCS / "slurm.md"
    [block] = [block for block in blocks(page) if block.language == "bash"]
    message = re.search(r"`distlaunch (render slurm [^`]*)` prints:", page.read_text("utf-8"))
    assert message is not None
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert run(message[1].split(), {"PATH": os.defpath, "HOME": str(tmp_path)}) == 0
    assert capsys.readouterr().out == block.text


def test_the_site_lists_every_page():
    nav = (ROOT / "scripts" / "docslib" / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.glob("**/*.md")} | {
        "contributing/architecture.md"
    }


def test_every_page_is_a_topic_of_help_and_none_is_named_as_a_command():
    names = [page.stem for page in DOCS.glob("**/*.md")]
    assert sorted([*names, "architecture"]) == sorted(topics())
    commands = {"train", "plan", "render", "backends", "help", "torchrun", "accelerate"}
    assert not {*names} & {*commands, "deepspeed", "horovodrun"}


def test_variables_of_workers_with_gpus_are_documented():
    page = (DOCS / "reference" / "environment.md").read_text("utf-8")
    missing = [
        name for name in (*FLIGHT_RECORDER, "TORCH_NCCL_DUMP_ON_TIMEOUT") if f"`{name}`" not in page
    ]
    assert not missing


def test_every_page_is_in_the_package():
    found = re.search(
        r"^distlaunch = \[(.*)\]$", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE
    )
    assert found is not None
    patterns = re.findall(r'"([^"]*)"', found[1])
    packaged = {path for pattern in patterns for path in (ROOT / "distlaunch").glob(pattern)}
    assert packaged >= {path for path in DOCS.glob("**/*") if path.is_file()}


def docslib(module: str) -> ModuleType:
    """Import a module of scripts/docslib."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(f"docslib.{module}")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_generated_pages_are_current():
    pages = docslib("reference").pages()
    assert pages
    for path, text in pages.items():
        assert path.read_text("utf-8") == text, "scripts/docs --write makes it anew"


def test_the_picture_of_the_rooms_is_current():
    rooms = docslib("rooms")
    assert rooms.ROOMS.read_text("utf-8") == rooms.draw_rooms(), (
        "scripts/docs --write draws it anew"
    )


def test_the_picture_has_every_room_and_arrows_that_lead_down():
    rooms = docslib("rooms")
    floor = {room: number for number, row in enumerate(rooms.floors()) for room in row}
    folders = {path.parent.name for path in (ROOT / "distlaunch").glob("*/__init__.py")}
    assert set(floor) == folders | {"__main__"}
    assert len(rooms.arrows()) > 20
    assert all(floor[source] < floor[target] for source, target in rooms.arrows())
    picture = ET.fromstring(rooms.draw_rooms())
    named = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert set(floor) <= named


def test_the_manual_page_is_current_and_well_formed():
    manual = docslib("manual")
    assert manual.MANUAL.read_text("utf-8") == manual.manual(), "scripts/docs --write makes it anew"
    checker = ["mandoc", "-Tlint"] if shutil.which("mandoc") else ["groff", "-man", "-ww", "-z"]
    done = subprocess.run(
        [*checker, manual.MANUAL], capture_output=True, text=True, timeout=60, check=False
    )
    found = [
        line for line in (done.stdout + done.stderr).splitlines() if "missing date" not in line
    ]
    assert found == []


def test_the_manual_page_has_every_command_and_every_option():
    text = docslib("manual").manual().replace("\\-", "-").replace("\\:", "")
    assert [words for words in SUMMARIES if f"\\fB{' '.join(words)}\\fR\n" not in text] == []
    tables = [PLAN_OPTIONS, *(options_of(target) for target in TARGETS)]
    tables += [
        importlib.import_module(f"distlaunch.cli.compat.{name}.options").OPTIONS
        for name in ("torchrun", "deepspeed", "horovodrun", "accelerate")
    ]
    names = {flag for table in tables for option in table for flag in option.flags}
    assert {flag for flag in names if not re.search(rf"{re.escape(flag)}[ ,\n\\]", text)} == set()


def test_the_manual_page_is_installed():
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    assert '[tool.setuptools.data-files]\n"share/man/man1" = ["man/distlaunch.1"]\n' in settings


def test_every_event_is_documented():
    page = (DOCS / "reference" / "event-log.md").read_text("utf-8")
    types = set()
    for source in (ROOT / "distlaunch" / "coordinator").glob("**/*.py"):
        text = source.read_text("utf-8")
        types |= set(re.findall(r'RecordEvent\(\s*type="(\w+)"', text))
        types |= set(re.findall(r'vents\.write\(\s*"(\w+)"', text))
    assert len(types) > 20
    assert {kind for kind in types if f"| `{kind}` |" not in page} == set()


def test_every_exit_code_is_documented():
    from distlaunch.core import errors

    page = (DOCS / "reference" / "exit-codes.md").read_text("utf-8")
    codes = {value for key, value in vars(errors).items() if key.startswith("EXIT_")}
    assert len(codes) >= 5
    assert {code for code in codes if f"| {code} |" not in page} == set()


def test_the_readme_is_short_and_the_glossary_too():
    assert len(README.read_text("utf-8").splitlines()) <= 150
    glossary = (DOCS / "glossary.md").read_text("utf-8")
    assert len(re.findall(r"^\| (?!word|---)", glossary, re.MULTILINE)) <= 25

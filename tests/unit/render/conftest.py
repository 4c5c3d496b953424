"""Files that ``render`` prints for a command line."""

from __future__ import annotations

import pytest
import yaml

from distlaunch.cli.commands.render import parse_render, spell
from distlaunch.render.request import RenderRequest
from distlaunch.render.targets import render


def text_of(target: str, *words: str, **environ: str) -> str:
    """Return the file for a command line."""
    options, more = parse_render(target, words, environ)
    return render(RenderRequest(target=target, train=options, more=more, words=spell(options)))


@pytest.fixture(scope="session")
def text():
    return text_of


@pytest.fixture(scope="session")
def manifests():
    """Return a function that parses the documents of a manifest."""

    def read(target: str, *words: str, **environ: str) -> list[dict]:
        return list(yaml.safe_load_all(text_of(target, *words, **environ)))

    return read

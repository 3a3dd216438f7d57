"""A new chat project with a small decoder."""

from __future__ import annotations

import pytest
from tests.chat_projects import new_chat_project


@pytest.fixture(scope="session")
def chat_project(tmp_path_factory):
    """The project, whose base was hardly trained. Tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("projects") / "my_chat"
    new_chat_project(folder)
    return folder

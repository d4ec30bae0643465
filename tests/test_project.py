"""What a contributor meets first: forms, workflows and guides name only what there is."""

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_only_call_the_makefile(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            command = step.get("run", "")
            if command.startswith("test "):  # the tag is the version
                continue
            assert not command or command.removeprefix("sudo ").split()[0] == "make", command
            assert not command or command.split()[-1] in TARGETS, command


def test_issue_forms_ask_for_something():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem != "config":
            assert {"name", "description", "body"} <= form.keys()
            assert any(each.get("validations", {}).get("required") for each in form["body"])


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_guides_name_files_and_targets_that_exist(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"`make (?:PYTHON=\S+ )?([a-z-]+)`", text):
        assert target in TARGETS
    for path in re.findall(r"`([\w.]+/[\w./-]+)`|\]\(([\w./-]+)\)", text):
        (named,) = filter(None, path)
        assert "NAME" in named or (ROOT / named).exists(), named


def test_a_citation_is_of_this_version():
    import lmtier

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == lmtier.__version__

"""The documentation builds only if every link and anchor leads somewhere, and its prose is plain."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmtier

ROOT = Path(__file__).parents[1]
PLACES = ("README.md", "docs", "examples", "deploy", "integrations", "lmtier", "backends", "bench")


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run([*command, "--site-dir", str(site)], capture_output=True, text=True, timeout=240)


def test_the_api_page_has_every_public_name_once():
    named = re.findall(r"^::: lmtier\.(\w+)$", (ROOT / "docs" / "API.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(lmtier.__all__) - {"__version__"})


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    for name, link in {"page": "(gone.md)", "anchor": "(#gone)", "file": "(../gone.py)"}.items():
        folder = tmp_path / name
        (folder / "docs").mkdir(parents=True)
        (folder / "docs" / "index.md").write_text(f"# Start\n\n[broken]{link}\n")
        (folder / "docs" / "site.py").write_bytes((ROOT / "docs" / "site.py").read_bytes())
        (folder / "docs" / "theme").symlink_to(ROOT / "docs" / "theme")
        menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[0]
        (folder / "mkdocs.yml").write_text(f"{menu}\nnav:\n  - Start: index.md\n")
        done = build(folder / "mkdocs.yml", folder / "site")
        assert done.returncode != 0, name
        assert "gone" in done.stderr


def check_prose(*pages: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "docs" / "prose.py"), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_prose_of_all_pages_is_plain():
    done = check_prose()
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("It simply works.", "5: 'simply'"),
        ("long " * 25, "5: 124 characters"),
        (" ".join(["word"] * 17) + "\n" + " ".join(["word"] * 17), "5: a sentence of 34 words"),
    ],
)
def test_prose_that_is_not_plain_fails_the_check(tmp_path, text, complaint):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n    lmtier ping\n\n{text.strip()}\n")
    done = check_prose(page)
    assert done.returncode == 1
    assert f"{page}:{complaint}" in done.stdout


def test_a_page_without_a_command_at_its_start_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nWhat it is for.\n\n## Then\n\n    lmtier ping\n")
    done = check_prose(page)
    assert done.returncode == 1
    assert "no command or code to copy" in done.stdout


def test_every_claim_names_tests_and_scripts_that_exist():
    page = (ROOT / "docs" / "CLAIMS.md").read_text()
    commands = re.findall(r"`((?:pytest|bench/)[^`]+)`", page)
    named = {word for command in commands for word in re.findall(r"(?:tests|bench)/\S+", command)}
    assert len(named) > 20
    assert not [each for each in named if not (ROOT / each).exists()]


def test_no_text_puts_a_disk_tier_into_a_shared_directory():
    """Such a directory may be made by somebody else first, if its name is known before."""
    shared = re.compile(r"disk://(/var)?/(tmp|dev/shm)\b")
    files = [each for place in PLACES for each in [ROOT / place, *(ROOT / place).rglob("*")]]
    texts = [each for each in files if each.suffix in (".md", ".py", ".toml", ".yml", ".yaml", ".service")]
    assert len(texts) > 100
    assert [str(each) for each in texts if shared.search(each.read_text())] == []

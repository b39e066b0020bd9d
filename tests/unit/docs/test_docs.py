"""The documentation holds together: links resolve, every page is reachable, indexes are complete."""

import re
from pathlib import Path

import pytest

from kvpool_agent.config_load import load_config

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "charts/README.md", ROOT / "crds/README.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INVARIANTS = [
    "PRUNE_ONCE",
    "LOAD_SUBSET_OF_VERIFIED",
    "MASK_COVERS_HIT",
    "LOADED_OR_REPORTED",
    "FENCED",
    "WHOLE_OR_ABSENT",
    "NO_SAVE_AFTER_FAILURE",
    "SAME_IDENTITY",
    "BOUNDED",
    "CRASH_ONLY",
]


def local_links(page: Path) -> list[Path]:
    """What `page` links to inside the repository."""
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text())]
    return [(page.parent / target).resolve() for target in targets if target and "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_resolves(page: Path) -> None:
    dead = [str(target.relative_to(ROOT)) for target in local_links(page) if not target.exists()]
    assert not dead


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        todo += local_links(page)
    assert {page for page in PAGES if page.is_relative_to(DOCS)} <= reached


def test_every_decision_is_indexed_and_says_what_was_refused() -> None:
    index = (DOCS / "adr/README.md").read_text()
    decisions = sorted(DOCS.glob("adr/[0-9]*.md"))
    assert [int(page.name[:4]) for page in decisions] == list(range(1, len(decisions) + 1))
    for page in decisions:
        text = page.read_text()
        title = re.match(rf"# {page.name[:4]}: (.+)\n", text)
        assert title, f"{page.name} does not open with its number and title"
        assert f"[{page.name[:4]}]({page.name}) | {title[1]} |" in index
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "Refused"], page.name


def test_the_configuration_in_the_guide_is_one_that_the_agent_accepts(tmp_path: Path) -> None:
    guide = (DOCS / "how-to/run-an-agent.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == 1
    path = tmp_path / "agent.yaml"
    path.write_text(blocks[0])
    assert load_config(path, {"KVPOOL_AGENT__SEGMENT__SIZE": "4Gi"}).segment.size == 4 << 30


def test_every_make_target_is_documented() -> None:
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = (DOCS / "reference/commands.md").read_text()
    assert targets, "no target has a line of help"
    for target in set(targets) - {"help"}:
        assert re.search(rf"^\| `make {target}[ `]", commands, re.MULTILINE), (
            f"make {target} is not in commands.md"
        )


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_invariant_is_explained_enforced_and_guarded(name: str) -> None:
    assert f"| {name} |" in (DOCS / "explanation/invariants.md").read_text()
    sources = [path for top in ("agent", "operator") for path in (ROOT / top).rglob("*.py")]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in sources), f"no docstring names {name}"
    # The name of a test, or of a file of tests, bears the invariant's name.
    guards = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    bears = re.compile(rf"def test_\w*{name.lower()}")
    assert any(f"test_{name.lower()}" in path.stem or bears.search(path.read_text()) for path in guards), (
        f"no test bears the name {name.lower()}"
    )


@pytest.mark.parametrize(
    "said",
    [
        "no circuit breaker per peer yet",
        "later loads that name such a key pay their deadline too",
        "for now a loader gets local chunks like remote ones",
        "Mooncake authenticates nobody",
        "No real RDMA, no real GPU",
    ],
)
def test_what_is_not_there_is_said(said: str) -> None:
    pages = (ROOT / "README.md", DOCS / "explanation/limits.md")
    assert any(said in " ".join(page.read_text().split()) for page in pages)

"""Generated pages are current, and links between pages lead somewhere."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", ["transitions", "configuration"])
def test_generated_page_is_current(name):
    page = runpy.run_path(str(ROOT / "docs" / f"generate_{name}.py"))["page"]()
    assert (ROOT / "docs" / f"{name}.md").read_text() == page, f"run python docs/generate_{name}.py"


def test_the_picture_of_the_figures_is_drawn_from_the_results():
    script = runpy.run_path(str(ROOT / "docs" / "generate_performance.py"))
    peers, roofline = (
        json.loads((script["RESULTS"] / name).read_text()) for name in ("peers_vllm.json", "roofline.json")
    )
    beside, steps = script["draw"](peers, roofline).axes
    rates = [engine["out tok/s"] for engines in peers["medians"].values() for engine in engines.values()]
    assert {text.get_text() for text in beside.texts} == {f"{rate:.0f}" for rate in rates}
    assert len(steps.patches) == len(roofline["steps"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_pages_exist(page):
    """A path in code marks, such as `pagedjax/core/state.py`, from the root or from pagedjax/."""
    named = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|ipynb|md|json|toml))`", page.read_text())
    assert [path for path in named if not any((base / path).exists() for base in (ROOT, ROOT / "pagedjax"))] == []


def test_metrics_named_in_pages_exist():
    named = set(re.findall(r"`(pagedjax_[a-z_]+)`", "".join(page.read_text() for page in PAGES)))
    sources = "".join(path.read_text() for top in ("pagedjax", "serving") for path in (ROOT / top).rglob("*.py"))
    assert named
    assert sorted(name for name in named if f'"{name.removesuffix("_total")}"' not in sources) == []

"""report.html in a real browser: drawn without any network, and looked at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.browser import find_browser, opened_tab
from tests.helpers.long_run import write_run
from vime.observability.html_report import write_report

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: ./scripts/get_browser.sh brings one, VIME_BROWSER names one"
)


async def test_the_page_draws_every_chart_and_asks_for_nothing(tmp_path: Path) -> None:
    """The picture stays where REPORT_PICTURE says, for eyes."""
    assert BROWSER is not None
    path = write_report(write_run(tmp_path / "run", num_rounds=300, groups=4, error="engine-0 died"))
    assert path is not None
    async with opened_tab(BROWSER, tmp_path / "profile") as tab:
        await tab.open(path)
        assert await tab.evaluate("document.body.dataset.failed") is None
        num_charts = await tab.evaluate("document.querySelectorAll('.chart').length")
        assert num_charts >= 20
        assert await tab.evaluate("document.querySelectorAll('.chart .main-svg').length") >= num_charts
        drawn = await tab.evaluate(
            "[...document.querySelectorAll('.chart')].every((c) => c.querySelector('path.js-line'))"
        )
        assert drawn
        assert await tab.evaluate("document.querySelector('h1').textContent") == "runfailed"
        assert "onerror=alert(1)" in await tab.evaluate("document.querySelector('.prompt').textContent")
        assert await tab.evaluate("document.images.length") == 0  # no answer became HTML
        assert await tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture = Path(os.environ.get("REPORT_PICTURE", tmp_path / "report.png"))
        await tab.screenshot(picture)
        assert picture.stat().st_size > 100_000
        assert [url for url in tab.asked if not url.startswith(("file:", "blob:", "data:"))] == []
        assert tab.errors == []


async def test_a_group_is_looked_up_and_a_table_filtered(tmp_path: Path) -> None:
    assert BROWSER is not None
    path = write_report(write_run(tmp_path / "run", num_rounds=20, groups=4))
    assert path is not None
    type_into = "((node, text) => { node.value = text; node.dispatchEvent(new Event('input')); })"
    async with opened_tab(BROWSER, tmp_path / "profile") as tab:
        await tab.open(path)
        for group, fate in ((12, "round 2: kept for training"), (14, "round 2: dropped: zero_std"), (9999, "no group")):
            await tab.evaluate(f"{type_into}(document.querySelector('input[inputmode]'), '{group}')")
            said = await tab.evaluate("document.querySelector('input[inputmode]').closest('.bar').textContent")
            assert fate in said
        rows = "[...document.querySelectorAll('details tbody tr')].map((row) => row.textContent)"
        await tab.evaluate(f"{type_into}(document.querySelector('details input'), '14')")
        assert await tab.evaluate(f"{rows}.filter((text) => text.endsWith('zero_std'))") == [
            "1474zero_std", "214zero_std",  # round 14 with group 74, round 2 with group 14
        ]  # fmt: skip

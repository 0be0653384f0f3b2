"""The page of `penstock report` in a real browser: headless Chromium. `make test-report` runs this file."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.commands.attacks import ATTACKS, RUN
from tests.commands.served_page import served, write_page
from tests.commands.written_run import (
    many_samples,
    rollout,
    sample,
    view_of,
    write_attacked_run,
    write_lines,
    write_run,
)

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Yield the browser."""
    module: Any = importlib.import_module("playwright.sync_api")
    with module.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page in a tab, with all that it complained about."""

    def __init__(self, chromium: Any, url: str, **options: Any) -> None:
        self.tab = chromium.new_page(viewport={"width": 1400, "height": 1000}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", self._dismiss)
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(url)

    def _dismiss(self, dialog: Any) -> None:
        self.complaints.append("dialog")
        dialog.dismiss()

    def text(self, selector: str) -> str:
        return str(self.tab.inner_text(selector))

    def drawn(self, title: str) -> Any:
        """Return the chart of this title, once it is drawn."""
        figure = self.tab.locator("figure", has=self.tab.locator("b", has_text=title)).first
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        return figure


def open_report(chromium: Any, *folders: Path, **options: Any) -> Opened:
    write_page(*folders)
    return Opened(chromium, (folders[0] / "report.html").as_uri(), **options)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def everything_drawn(page: Opened) -> None:
    """Open all that can be opened, and bring every chart into sight."""
    for closed in page.tab.locator("summary").all():
        closed.scroll_into_view_if_needed()
        closed.click()
    for figure in page.tab.locator("figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()


def test_no_script_of_any_text_runs(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, write_attacked_run(tmp_path / "run", ATTACKS))

    everything_drawn(page)
    for colour in page.tab.locator("#samples input[type=radio]").all():
        colour.check()
    page.tab.locator("#samples .list").focus()
    for _ in range(2 * len(ATTACKS)):
        page.tab.keyboard.press("ArrowDown")
    for link in page.tab.locator("main a").all():
        link.click()

    assert page.tab.evaluate("window.attacked") is None
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert (
        page.tab.locator("main :is(img, iframe, script, object, embed, form[action], a[href^='javascript'])").count()
        == 0
    )


def test_the_text_of_each_attack_is_shown(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, write_attacked_run(tmp_path / "run", ATTACKS))
    page.tab.locator("#samples .list").focus()

    shown = []
    for _ in ATTACKS:
        shown.append(page.tab.locator("#samples .turn.prompt .text").first.text_content())
        page.tab.keyboard.press("ArrowDown")

    for text, seen in zip(ATTACKS.values(), shown, strict=True):
        beginning = text[:60]
        if beginning.isprintable():
            assert seen.startswith(beginning)
    assert shown[list(ATTACKS).index("NUL")] == "before⟨00⟩after"
    assert shown[list(ATTACKS).index("escapes of a terminal")] == "⟨1b⟩[2J⟨1b⟩]0;title⟨07⟩"


def test_sorted_and_searched_tables_show_attacks_as_text(chromium: Any, tmp_path: Path) -> None:
    runs = [tmp_path / name for name in (f'<img src=x onerror="{RUN}">', f"&lt;svg onload={RUN!r}&gt;")]
    for run in runs:
        write_attacked_run(run, ATTACKS)
    page = open_report(chromium, *runs)

    everything_drawn(page)
    for title in page.tab.locator("th.dt-orderable-asc").all():
        title.evaluate("each => { each.click(); each.click(); }")
    for search in page.tab.locator("input[type=search]").all():
        search.evaluate("each => { each.value = '<img'; each.dispatchEvent(new Event('input')); }")
    for search in page.tab.locator("input[type=search]").all():
        search.evaluate("each => { each.value = ''; each.dispatchEvent(new Event('input')); }")

    assert page.tab.locator("th.dt-orderable-asc").count() > 0
    assert page.tab.locator("input[type=search]").count() > 0
    assert page.tab.evaluate("window.attacked") is None
    assert page.complaints == []
    assert page.tab.locator("main :is(img, iframe, script, object, embed, table svg)").count() == 0


def test_a_script_that_is_put_into_the_page_does_not_run(chromium: Any, tmp_path: Path) -> None:
    """The policy of the page is a second wall: also a mistake of ours would run nothing."""
    page = open_report(chromium, write_run(tmp_path / "run"))

    page.tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.attacked = 1\">')"
    )
    page.tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.attacked = 1'}))"
    )
    page.tab.locator("img[onerror]").wait_for(state="attached")

    assert page.tab.evaluate("window.attacked") is None
    assert any("Content Security Policy" in complaint for complaint in page.complaints)


def test_keys_alone_reach_every_sample(chromium: Any, tmp_path: Path) -> None:
    samples = [sample(step=step, rank=rank, completion=f"answer {step}/{rank}") for step in (1, 10) for rank in (1, 2)]
    page = open_report(chromium, write_run(tmp_path / "run", samples=samples))

    def answer() -> str:
        return page.text("#samples .turn.model .text")

    page.tab.locator("#samples .list").focus()
    first = answer()
    page.tab.keyboard.press("ArrowDown")
    below = answer()
    page.tab.keyboard.press("ArrowLeft")
    before = answer()
    page.tab.keyboard.press("Home")

    assert (first, below, before, answer()) == ("answer 10/1", "answer 10/2", "answer 1/2", "answer 1/1")
    assert page.tab.evaluate("document.activeElement.getAttribute('role')") == "listbox"
    assert page.tab.locator("[role=option][aria-selected=true]").count() == 1


def test_the_first_tab_leads_past_the_head_and_focus_is_seen(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, write_run(tmp_path / "run"))

    page.tab.keyboard.press("Tab")

    assert page.tab.evaluate("document.activeElement.textContent") == "Skip to the curves"
    assert page.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_every_field_and_chart_has_a_name(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, write_run(tmp_path / "run", samples=[rollout()]))
    everything_drawn(page)

    assert (
        page.tab.evaluate(
            "[...document.querySelectorAll('input, select')].filter((field) => !field.labels.length).length"
        )
        == 0
    )
    assert page.tab.evaluate("[...document.querySelectorAll('.chart')].filter((chart) => !chart.ariaLabel).length") == 0
    assert "reward over optimizer step: run ends at" in str(
        page.drawn("reward").locator(".chart").get_attribute("aria-label")
    )


def test_clicks_change_the_axis_the_metrics_and_the_runs(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, *(write_run(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))))
    reward = page.drawn("reward")

    def lines() -> int:
        return int(reward.locator(".scatterlayer .trace").count())

    both = lines()
    page.tab.get_by_role("checkbox", name="two").uncheck()
    one = lines()
    page.tab.get_by_label("hours of training").check()
    page.tab.locator("#filter").fill("grad")

    assert (both, one) == (4, 2)
    assert "hours of training" in str(reward.locator(".xtitle").text_content())
    assert page.tab.locator("#curves figure").count() == 1
    assert page.complaints == []


def test_dragging_zooms_and_a_double_click_shows_all(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, write_run(tmp_path / "run"))
    chart = page.drawn("reward").locator(".chart")

    def width() -> float:
        return float(chart.evaluate("(place) => place.layout.xaxis.range[1] - place.layout.xaxis.range[0]"))

    chart.evaluate("(place) => { place.once('plotly_relayout', () => { place.dataset.zoomed = 'yes'; }); }")
    whole, box = width(), page.drawn("reward").locator(".nsewdrag").first.bounding_box()
    page.tab.mouse.move(box["x"] + 50, box["y"] + 20)
    page.tab.mouse.down()
    page.tab.mouse.move(box["x"] + 150, box["y"] + 120, steps=5)
    page.tab.mouse.up()
    chart.and_(page.tab.locator("[data-zoomed]")).wait_for()
    zoomed = width()

    assert zoomed < whole / 2


def test_a_table_is_sorted_by_keys_and_searched(chromium: Any, tmp_path: Path) -> None:
    keys = {f"key{number:02}": number for number in range(30)}
    page = open_report(chromium, write_run(tmp_path / "run", config=keys))
    page.tab.locator("#settings summary").click()
    table = page.tab.locator("#settings .scroll")

    table.get_by_role("searchbox").fill("key1")
    page.tab.locator("#settings tbody:not(:has(tr:nth-child(11)))").wait_for()
    found = table.locator("tbody tr").count()
    sort = table.get_by_role("button", name="key")
    for order in ("ascending", "descending"):
        sort.focus()
        page.tab.keyboard.press("Enter")
        page.tab.locator(f"#settings th[aria-sort={order}]").wait_for()
    page.tab.locator("#settings tbody tr:first-child", has_text="key19").wait_for()

    assert found == 10
    assert table.locator("tbody td").first.inner_text() == "key19"
    assert page.complaints == []


def test_the_reasons_of_ends_are_drawn_over_time_and_counted_over_the_whole_run(chromium: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    view = view_of(["older than 2 steps"])
    balance = view["shown"]["balance"]
    balance["ended"] |= {"stale": 3, "failed": 0}
    balance["reasons"] |= {"stale": balance["reasons"]["failed"], "failed": {}}
    (run / "view.json").write_text(json.dumps(view))
    counted = sum(line.get("ended/stale/older than 2 steps", 0) for line in lines_of(run / "metrics.jsonl"))
    page = open_report(chromium, run)

    drawn = page.drawn("reasons over time")
    drawn.locator(".legendtext").first.wait_for()
    page.tab.locator("#ledger summary").click()

    assert sorted(drawn.locator(".legendtext").all_text_contents()) == [
        "filtered: all completions were scored alike",
        "stale: older than 2 steps",
    ]
    assert f"{counted:.0f}" in page.tab.locator("#ledger tr", has_text="older than 2 steps").inner_text().split("\t")


def test_a_rollout_is_a_tree_of_turns_that_lead_to_their_text(chromium: Any, tmp_path: Path) -> None:
    page = open_report(chromium, write_run(tmp_path / "run", samples=[rollout()]))

    tree = page.text("#samples .tree")
    page.tab.locator("#samples .jump.environment").click()
    page.tab.get_by_label("log-probability ratio").check()

    assert "model, calls a tool" in tree
    assert "environment, answer of a tool" in tree
    assert "sequence 2 of 2" in tree
    assert page.tab.locator("#samples .turn.model span[title]").count() == 7
    assert "from -0.4 to 0.3" in page.text("#samples .detail .note")
    assert page.tab.locator("#samples .turn.environment").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(chromium: Any, tmp_path: Path, scheme: str) -> None:
    page = open_report(chromium, write_run(tmp_path / "run", samples=[rollout()]), color_scheme=scheme)

    ink, back = (page.tab.evaluate(f"getComputedStyle(document.body).{of}") for of in ("color", "backgroundColor"))

    assert contrast(ink, back) > 10
    for quiet in ("about", "written"):
        assert contrast(page.tab.evaluate(f"getComputedStyle(document.querySelector('.{quiet}')).color"), back) > 4.5


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours `rgb(…)`: WCAG 2, where 4.5 is enough for text."""
    lights = sorted(luminance([int(part) for part in each[4:-1].split(",")]) for each in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: list[int]) -> float:
    linear = [(part / 255 / 12.92) if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_ten_thousand_steps_and_a_hundred_thousand_samples_stay_usable(chromium: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10_000, samples=many_samples(100_000, steps=10_000))

    page = open_report(chromium, run)
    everything_drawn(page)

    assert "100,000 samples of 10,000 steps" in page.text("#rules")
    assert page.tab.locator("#samples .row").count() == 10
    assert page.tab.evaluate("document.querySelectorAll('*').length") < 60_000
    assert page.complaints == []


def test_a_page_that_follows_a_run_shows_new_steps_and_keeps_its_place(chromium: Any, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", samples=[sample(step=1, completion="first"), sample(step=10, completion="second")]
    )
    with served(run) as url:
        page = Opened(chromium, url)
        page.tab.locator("#samples .list").focus()
        page.tab.keyboard.press("ArrowLeft")
        page.tab.evaluate("window.scrollTo(0, 700)")
        page.drawn("reward")
        at = page.tab.evaluate("window.scrollY")

        write_lines(run / "metrics.jsonl", [{"step": 77, "reward": 0.25}])
        write_lines(run / "samples.jsonl", [sample(step=77, completion="third")])
        page.tab.locator("#facts", has_text="77").wait_for()

        assert page.text("#samples .turn.model .text") == "first"
        assert page.tab.evaluate("window.scrollY") == at
        assert "77" in page.text("#samples select >> nth=1")
    page.tab.wait_for_selector("#following.lost")


def test_a_page_that_follows_a_run_keeps_the_part_of_a_curve_that_is_zoomed_into(chromium: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=40)
    with served(run) as url:
        page = Opened(chromium, url)
        chart = page.drawn("reward").locator(".chart")
        chart.evaluate("(place) => Plotly.relayout(place, { 'xaxis.range': [10, 20] })")

        write_lines(run / "metrics.jsonl", [{"step": 77, "reward": 0.25}])
        page.tab.locator("#facts", has_text="77").wait_for()

        page.tab.wait_for_function("(place) => place.data.at(-1).x.at(-1) === 77", arg=chart.element_handle())
        assert chart.evaluate("(place) => place.layout.xaxis.range") == [10, 20]


def test_a_page_of_another_name_gets_no_answer(chromium: Any, tmp_path: Path) -> None:
    with served(write_run(tmp_path / "run")) as url:
        tab = chromium.new_page(extra_http_headers={"Host": "attacker.example"})
        answer = tab.request.get(f"{url}data.json", headers={"Host": "attacker.example"})

    assert answer.status == 400

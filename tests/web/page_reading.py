"""What a test reads off the page, and how it waits for it."""

from urllib.parse import quote

from playwright.sync_api import Page, expect

PROMPT = "<BOS> dragon drinks"
PLACE = f"m=toy&p={quote(PROMPT)}"


def percents(page: Page) -> dict[str, str]:
    rows = page.locator(".rows .row")
    return {
        row.locator(".piece").inner_text(): row.locator(".p").inner_text()
        for row in (rows.nth(i) for i in range(rows.count()))
    }


def shown(probability: float) -> str:
    if probability == 0:
        return "–"
    if probability < 0.0001:
        return "< 0.01 %"
    return f"{100 * probability:.{2 if probability < 0.1 else 1}f} %"


def slide(page: Page, name: str, value: float) -> None:
    page.get_by_label(name, exact=True).evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', {bubbles: true})); }",
        str(value),
    )


def number(text: str) -> float:
    """A number as the page writes it."""
    powers = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻−", "0123456789--")
    return float(text.translate(powers).replace("×10", "e"))


def settled(page: Page) -> None:
    """Waits until no pass is under way."""
    expect(page.locator(".stream-panel")).to_have_attribute("aria-busy", "false")


def has_ink(page: Page, selector: str) -> bool:
    """Whether a canvas shows more than one colour."""
    return page.locator(selector).first.evaluate(
        """canvas => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size > 5;
        }"""
    )

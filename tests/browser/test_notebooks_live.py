"""Each notebook in JupyterLab, as somebody at a browser has it: run all, move a control, and the picture changes."""

from pathlib import Path

import pytest
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LOAD, RUN, REDRAW = 60, 400, 30  # seconds

pytestmark = pytest.mark.browser

# the page's own application object says when it is ready; nothing here waits for a time
NOTEBOOK = "[...window.jupyterapp.shell.widgets('main')].find(w => w.context && w.context.path === arguments[0])"
OPENED = f"return !!window.jupyterapp && !!({NOTEBOOK})"
READY = f"""
const done = arguments[1], app = window.jupyterapp, panel = {NOTEBOOK};
(async () => {{
  await app.restored;
  await panel.context.ready;
  await panel.sessionContext.ready;
  await panel.sessionContext.session.kernel.info;
  app.shell.activateById(panel.id);
  return "ready";
}})().then(done, error => done("failed: " + error));
"""
# its result is asked for until it is there: a call that waits minutes would run into the driver's own timeout
RUN_ALL = f"""
const app = window.jupyterapp, panel = {NOTEBOOK};
window.k3labRan = null;
(async () => {{
  await app.commands.execute("notebook:run-all-cells");
  const cells = [...panel.content.model.cells].map(cell => cell.toJSON()).filter(cell => cell.cell_type === "code");
  const errors = cells.flatMap(cell => cell.outputs).filter(output => output.output_type === "error");
  return {{
    cells: cells.length,
    run: cells.filter(cell => cell.execution_count !== null).length,
    errors: errors.map(error => error.ename + ": " + error.evalue),
  }};
}})().then(ran => window.k3labRan = ran, error => window.k3labRan = {{errors: ["failed: " + error]}});
"""
CLEAR = f"""
const done = arguments[1], app = window.jupyterapp, panel = {NOTEBOOK};
app.commands.execute("notebook:clear-all-cell-outputs").then(() => {{
  done([...panel.content.model.cells].flatMap(cell => cell.toJSON().outputs || []).length);
}}, error => done("failed: " + error));
"""


def open_notebook(browser: Chrome, url: str, name: str) -> None:
    browser.set_script_timeout(LOAD)
    browser.get(url)
    WebDriverWait(browser, LOAD).until(lambda b: b.execute_script(OPENED, name))
    assert browser.execute_async_script(READY, name) == "ready"
    assert browser.execute_async_script(CLEAR, name) == 0, "outputs of the committed notebook are left"


PICTURE = """
const img = arguments[0].querySelector(".k3lab-picture img");
return img && img.complete && img.naturalWidth > 100 ? img.src : "";
"""


def picture(panel: WebElement) -> str:
    """The address of the panel's picture, "" while there is none or it is not decoded."""
    return panel.parent.execute_script(PICTURE, panel)


def changed(browser: Chrome, panel: WebElement, before: str) -> str:
    """The picture that takes the place of `before`, as soon as it is there; what the panel says is in the error if none comes."""
    try:
        return WebDriverWait(browser, REDRAW, poll_frequency=0.05).until(lambda _: picture(panel) not in ("", before) and picture(panel))
    except TimeoutException:
        said = panel.find_element(By.CSS_SELECTOR, ".k3lab-message").text
        raise AssertionError(f"no new picture in {REDRAW} s; the panel says: {said!r}") from None


def panels_of(browser: Chrome, expected: int) -> list[WebElement]:
    """The panels, once the page has made all that the notebook shows; more than that fails too."""
    WebDriverWait(browser, REDRAW).until(lambda b: len(b.find_elements(By.CSS_SELECTOR, ".k3lab-panel")) >= expected)
    found = browser.find_elements(By.CSS_SELECTOR, ".k3lab-panel")
    assert len(found) == expected
    return found


def console_errors(browser: Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_run_all_then_move_a_control_and_the_picture_changes(lab: str, browser: Chrome, notebook: Path):
    """Every cell runs without an error, a slider or grid and a list each redraw the panel, and the console has no error."""
    open_notebook(browser, lab.format(notebook.name), notebook.name)
    browser.execute_script(RUN_ALL, notebook.name)
    ran = WebDriverWait(browser, RUN).until(lambda b: b.execute_script("return window.k3labRan"))
    assert ran["errors"] == []
    assert ran["run"] == ran["cells"] > 0

    for panel in panels_of(browser, notebook.with_suffix(".py").read_text().count("_panel.show(")):
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", panel)
        seen = [changed(browser, panel, "")]
        for handle in panel.find_elements(By.CSS_SELECTOR, ".noUi-handle")[:1]:
            ActionChains(browser).click(handle).send_keys(Keys.ARROW_LEFT).perform()
            seen.append(changed(browser, panel, seen[-1]))
        for button in panel.find_elements(By.CSS_SELECTOR, ".widget-gridbox button")[:1]:
            button.click()
            seen.append(changed(browser, panel, seen[-1]))
        for control in panel.find_elements(By.CSS_SELECTOR, "select")[:1]:
            choice = Select(control)
            at = choice.options.index(choice.first_selected_option)
            choice.select_by_index((at + 1) % len(choice.options))
            seen.append(changed(browser, panel, seen[-1]))
        assert len(seen) > 1, "the panel has no control that this test can move"
        assert len(set(seen)) == len(seen)
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", panel)  # for the screenshot
    assert console_errors(browser) == []

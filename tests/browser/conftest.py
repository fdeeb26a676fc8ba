"""JupyterLab on a copy of the notebooks, and a headless Chromium; both end with the tests."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "out" / "browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1500,1700",
)  # fmt: skip
HINT = "install it with .ci/browser (Debian), or Chromium and the ChromeDriver of its version by hand, both on PATH"
END_KERNELS = (
    "const done = arguments[0]; window.jupyterapp ? window.jupyterapp.serviceManager.sessions.shutdownAll().then(done, done) : done()"
)
START = 60  # seconds for a server to write its address


def _programs() -> tuple[str, str]:
    """Paths of the browser and its driver; the test is skipped if one is absent."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not browser or not driver:
        missing = " and ".join(name for name, path in (("Chromium", browser), ("chromedriver", driver)) if not path)
        pytest.skip(f"no {missing} on PATH: {HINT}")
    return browser, driver


def _settings(folder: Path) -> None:
    """No question about news, which would lie over the page, and no request to the network for it."""
    path = folder / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab, "{}" where a notebook's name goes; its folder holds copies of notebooks/*.ipynb."""
    _programs()
    top = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", top / "notebooks", ignore=shutil.ignore_patterns("*.py", ".*"))
    (top / "data").symlink_to(ROOT / "data")
    _settings(top / "settings")
    token = secrets.token_hex(16)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "K3LAB_"))}
    env |= {f"JUPYTER_{k}_DIR": str(top / "jupyter" / k.lower()) for k in ("CONFIG", "DATA", "RUNTIME")}
    env |= {"JUPYTERLAB_SETTINGS_DIR": str(top / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(top / "workspaces")}
    env |= {"JUPYTER_PREFER_ENV_PATH": "1", "JUPYTER_TOKEN": token, "IPYTHONDIR": str(top / "ipython"), "K3LAB_OUT": str(top / "out")}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root",
        f"--ServerApp.root_dir={top / 'notebooks'}", "--LabApp.expose_app_in_browser=True", "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    with open(top / "server.log", "w") as log:
        server = subprocess.Popen(command, env=env, cwd=top, stdout=log, stderr=log)
    try:
        yield f"{_address(top / 'jupyter' / 'runtime', server, top / 'server.log')}lab/tree/{{}}?reset&token={token}"
    finally:
        server.send_signal(signal.SIGTERM)  # it ends its kernels first
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(runtime: Path, server: subprocess.Popen, log: Path) -> str:
    """The URL that the server writes once it listens."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        for path in runtime.glob("jpserver-*.json"):
            text = path.read_text()
            if text.endswith("}"):  # written whole
                return json.loads(text)["url"]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@pytest.fixture
def browser(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[webdriver.Chrome]:
    """A Chromium with a profile of its own, which keeps what pages write to the console; its last view goes to out/browser/."""
    binary, driver = _programs()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    chrome = webdriver.Chrome(options=options, service=Service(executable_path=driver))
    yield chrome
    SHOTS.mkdir(parents=True, exist_ok=True)
    chrome.save_screenshot(str(SHOTS / f"{request.node.callspec.id}.png"))  # after a failure, too
    chrome.execute_async_script(END_KERNELS)  # the next notebook has the memory for itself
    chrome.quit()

"""A headless Chromium for tests of pages, by Selenium."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conftest import missing, require_package

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


def start_chromium() -> Chrome:
    """Skips the test where there is no Chromium, no driver of it, or no Selenium."""
    require_package("selenium")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        missing("Chromium or its driver is not installed (apt-get install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # Containers often have neither the rights for its sandbox nor a large /dev/shm.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chromium.set_script_timeout(60)
    chromium.set_page_load_timeout(60)
    return chromium


class Tab:
    """One page in Chromium."""

    def __init__(self, chromium: Chrome) -> None:
        self.chromium = chromium

    def open(self, page: Path | str, *, size: str = "desktop", scheme: str = "light", hash: str = "") -> None:
        width, height = SIZES[size]
        self.chromium.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"},
        )
        self.chromium.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        self.chromium.get("about:blank")  # or another hash would not load the page again
        self.chromium.get_log("browser")  # forgets what other pages have said
        self.chromium.get((page.as_uri() if isinstance(page, Path) else page) + hash)

    def js(self, script: str, *arguments: Any) -> Any:
        """The value of a JavaScript expression; `args` are its arguments."""
        return self.chromium.execute_script(f"const args = arguments; return ({script})", *arguments)

    def keys(self, *names: str) -> None:
        from selenium.webdriver import ActionChains
        from selenium.webdriver.common.keys import Keys

        actions = ActionChains(self.chromium)
        for name in names:
            actions.send_keys(getattr(Keys, name))
        actions.perform()

    def wait_for(self, condition: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.chromium, 20, 0.02).until(lambda _: self.js(condition))

    def complaints(self) -> list[str]:
        """What the page has written to its console, errors among it."""
        return [entry["message"] for entry in self.chromium.get_log("browser")]

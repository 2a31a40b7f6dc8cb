"""Pictures of the demo's report, as a browser shows it: python docs/screenshots.py demo/report.html

By day, by night, on a telephone and on paper, into docs/images; Chromium and its driver have to be there.
"""

from __future__ import annotations

import base64
import shutil
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

TARGET = Path(__file__).parent / "images"
WAYS = {"light": ("light", "", 1000, 860), "dark": ("dark", "", 1000, 860), "narrow": ("light", "", 390, 760),
        "print": ("light", "print", 720, 1000)}  # fmt: skip
PLACES = {"light": "summary", "dark": "attacks", "narrow": "", "print": "frontier"}


def main() -> None:
    driver = shutil.which("chromedriver")
    if driver is None or len(sys.argv) != 2:
        sys.exit(__doc__)
    options = webdriver.ChromeOptions()
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking",
                 "disable-component-update", "disable-sync", "hide-scrollbars"):  # fmt: skip
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        for name, (scheme, media, width, height) in WAYS.items():
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(f"{Path(sys.argv[1]).resolve().as_uri()}#{PLACES[name]}")
            shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 80})
            (TARGET / f"report-{name}.webp").write_bytes(base64.b64decode(shot["data"]))
    finally:
        browser.quit()


if __name__ == "__main__":
    main()

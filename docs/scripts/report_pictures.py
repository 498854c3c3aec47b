"""Draw docs/images/report-light.png and report-dark.png from a run; needs Chromium."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCHEMES = {"light": 1, "dark": 0}
"""Blink's numbers for the colour scheme that a page may ask for."""


def main() -> int:
    """Write both pictures; returns the exit code."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or len(sys.argv) != 2:
        print("usage: python docs/scripts/report_pictures.py RUN  (with Chromium installed)")
        return 2
    page = (Path(sys.argv[1]) / "report.html").resolve()
    for name, number in SCHEMES.items():
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    browser,
                    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                    *("--window-size=1100,1400", f"--user-data-dir={profile}"),
                    f"--blink-settings=preferredColorScheme={number}",
                    f"--screenshot={IMAGES / f'report-{name}.png'}",
                    page.as_uri(),
                ],
                check=True,
                capture_output=True,
                timeout=120,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The picture of the README: the three figures of notebook 00, one below the other, to notebooks/overview.png.

python -m k3lab figures 00_nan 00_race 00_drafter --out out && python .ci/overview.py
"""

import os
from pathlib import Path

from PIL import Image

from notebooks import ROOT

NAMES = ("00_nan", "00_race", "00_drafter")


def stacked(paths: list[Path]) -> Image.Image:
    """Pictures one below the other on white, at half their size."""
    pictures = [Image.open(p).convert("RGB") for p in paths]
    whole = Image.new("RGB", (max(p.width for p in pictures), sum(p.height for p in pictures)), "white")
    y = 0
    for picture in pictures:
        whole.paste(picture, (0, y))
        y += picture.height
    return whole.resize((whole.width // 2, whole.height // 2), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    target = ROOT / "notebooks" / "overview.png"
    part = target.with_suffix(".part.png")
    stacked([ROOT / "out" / f"{n}.png" for n in NAMES]).quantize(128).save(part, optimize=True)
    os.replace(part, target)

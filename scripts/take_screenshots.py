"""Take the screenshots of docs/page: one per screen of the web page, with the pretrained model.

python scripts/take_screenshots.py [SCREEN ...] [--source MODEL] [--out docs/page]
python scripts/take_screenshots.py --recording

--recording writes recording.webp instead, an animated image of one minute.

The screen training is taken with a run: cutaway train python-stdlib, then --source runs/python-stdlib.

Needs the built page (hatch_build.py), web/node_modules and Chromium. The environment variable CHROMIUM is the path of
Chromium (default /usr/bin/chromium).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.server import serve_in_thread

from cutaway.cli.verbs.open import load_catalog
from cutaway.pretrained import DEFAULT_MODEL
from cutaway.serve import static_files
from cutaway.serve.app import build_app
from cutaway.serve.inspect import routes
from cutaway.serve.server import bind_socket, build_access_policy
from hatch_build import ROOT, WEB, find_node_and_npm

NUM_COLORS = 96
"""Number of colors per file. The page uses few colors, so a palette halves the file size without visible loss."""

RECORDING_QUALITY = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("screens", nargs="*", metavar="SCREEN", help="screens to take; default all")
    parser.add_argument("--source", default=DEFAULT_MODEL, help="model or run directory")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page")
    parser.add_argument("--recording", action="store_true", help="record a visit of the page instead")
    args = parser.parse_args()
    executor = routes.QueryExecutor(load_catalog(args.source, None, "cpu", None, quiet=True).current)
    app = build_app(
        [routes.build_router(executor), static_files.build_static_router()],
        access_policy=build_access_policy("127.0.0.1", None),
        on_shutdown=[executor.close],
    )
    node, _ = find_node_and_npm()
    with tempfile.TemporaryDirectory() as directory, serve_in_thread(app, bind_socket("127.0.0.1", 0)) as url:
        script = "e2e/record.mjs" if args.recording else "e2e/docs-screenshots.mjs"
        subprocess.run([node, script, f"{url}/", directory, *args.screens], cwd=WEB, check=True)
        if args.recording:
            save_recording(Path(directory), args.out / "recording.webp")
            return
        for path in sorted(Path(directory).glob("*.png")):
            save_compressed(path, args.out / path.name)


def save_compressed(source: Path, target: Path) -> None:
    """Save a PNG with a palette of NUM_COLORS colors."""
    with Image.open(source) as image:
        palette_image = image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
        palette_image.save(target, optimize=True)


def save_recording(frames: Path, target: Path) -> None:
    """Save the frames of e2e/record.mjs as an animated WebP image."""
    durations = json.loads((frames / "durations.json").read_text())
    images = [Image.open(path).convert("RGB") for path in sorted(frames.glob("*.png"))]
    images[0].save(
        target, save_all=True, append_images=images[1:], duration=durations, loop=0, quality=RECORDING_QUALITY, method=6
    )


if __name__ == "__main__":
    main()

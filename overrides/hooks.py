"""MkDocs hooks of the theme: the font of formulas, and what a shared link shows."""

import re
from base64 import b64decode, b64encode
from functools import cache
from html import escape, unescape
from importlib.metadata import distribution
from io import BytesIO
from pathlib import Path
from textwrap import shorten
from unicodedata import normalize

from fontTools import subset
from fontTools.ttLib import TTFont
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from PIL import Image, ImageDraw, ImageFont

from sidenotes.cache import ENVIRONMENT, cached, hash_of, path_for

FORMULA = re.compile(r"<math.*?</math>", re.DOTALL)
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")

# STIX Two Math, with the tables that place roots, fractions and scripts. (To import the
# package that carries it would print a warning.)
PACKAGE = distribution("ziamath")
FONT = PACKAGE.locate_file("ziamath/fonts/STIXTwoMath-Regular.ttf")
# The copyright and the license, the SIL Open Font License, stay in the font.
NAMES = [0, 1, 2, 4, 6, 13, 14]

# A root is an element: its sign is no character of the page.
ROOT = "√"

# A browser shows an identifier of one letter in italics, which are other characters.
CURSIVE = map(chr, (*range(0x1D434, 0x1D468), *range(0x1D6E2, 0x1D71C), 0x210E))
ITALIC = str.maketrans({normalize("NFKC", letter): letter for letter in CURSIVE})


def on_page_content(html: str, *, page: Page, **_: object) -> None:
    """Describe a page by its first paragraph."""
    if found := PARAGRAPH.search(html):
        text = shorten(text_of(found[1]), 200, placeholder=" …")
        page.meta.setdefault("description", escape(text))


def on_post_build(config: MkDocsConfig) -> None:
    """Add the font and the picture, which depend on all pages or on none."""
    site = Path(config.site_dir)
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    formulas = "".join(text_of(f) for page in pages for f in FORMULA.findall(page))
    characters = {*formulas, *formulas.translate(ITALIC), ROOT}
    used = "".join(sorted(characters))
    key = hash_of([used, Path(__file__).read_bytes(), ENVIRONMENT])
    stored = path_for(config.plugins["sidenotes"].cache / "hooks", "math", key, ".txt")
    font = b64decode(cached(stored, math_font, used))
    (site / "assets" / "math.woff2").write_bytes(font)
    (site / "assets" / "card.png").write_bytes(card(config.site_name))


def text_of(html: str) -> str:
    """What a browser would show of it, without line breaks."""
    return " ".join(unescape(TAG.sub("", html)).split())


def math_font(characters: str) -> str:
    """The part of the font that these characters need, as WOFF2 in base 64."""
    options = subset.Options(flavor="woff2", hinting=False, name_IDs=NAMES)
    # Smaller sizes have letters of their own, with thicker strokes.
    options.layout_features = ["ssty"]
    font = subset.load_font(str(FONT), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text=characters)
    subsetter.subset(font)
    narrow_roots(font)
    file = BytesIO()
    subset.save_font(font, file, options)
    return b64encode(file.getvalue()).decode()


def narrow_roots(font: TTFont) -> None:
    """Make the taller signs of a root as narrow as the smallest.

    Chromium leaves room for the widest after every root (its issue 1339724).
    """
    variants = font["MATH"].table.MathVariants
    root = font.getBestCmap()[ord(ROOT)]
    row = variants.VertGlyphCoverage.glyphs.index(root)
    taller = variants.VertGlyphConstruction[row]
    names = {record.VariantGlyph for record in taller.MathGlyphVariantRecord}
    names |= {part.glyph for part in taller.GlyphAssembly.PartRecords}
    width, _ = font["hmtx"][root]
    for name in names:
        glyph = font["glyf"][name]
        glyph.coordinates.scale((width / font["hmtx"][name][0], 1))
        glyph.coordinates.toInt()
        glyph.recalcBounds(font["glyf"])
        font["hmtx"][name] = width, glyph.xMin


@cache
def card(title: str) -> bytes:
    """The picture of a shared link: the logo, a causal mask, and the name."""
    image = Image.new("RGB", (1200, 630), "#ffffff")
    draw = ImageDraw.Draw(image)
    for row, blue in enumerate(("#5b76c9", "#8498d7", "#adbbe4")):
        for column in range(row + 1):
            x, y = 100 + 110 * column, 155 + 110 * row
            draw.rectangle((x, y, x + 90, y + 90), fill=blue)
    draw.text((480, 215), title, "#24292f", ImageFont.load_default(104))
    line = "Multi-head attention, line by line"
    draw.text((486, 345), line, "#57606a", ImageFont.load_default(38))
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()

"""What can be said of a page without a browser: its language, title, headings, texts of pictures, links inside it."""

import itertools
from html.parser import HTMLParser


class Page(HTMLParser):
    """What a page consists of, in order."""

    def __init__(self, text):
        super().__init__()
        self.language, self.title, self.levels, self.pictures, self.ids, self.targets = None, "", [], [], [], []
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "html":
            self.language = attributes.get("lang")
        elif tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.levels.append(int(tag[1]))
        elif tag == "img":
            self.pictures.append(attributes.get("alt") or "")
        elif tag == "a" and (attributes.get("href") or "").startswith("#"):
            self.targets.append(attributes["href"][1:])
        if "id" in attributes:
            self.ids.append(attributes["id"])
        self._in_title = tag == "title"

    def handle_data(self, text):
        if self._in_title:
            self.title += text
            self._in_title = False


def mistakes(path):
    """What is wrong with an HTML page, in words."""
    page = Page(path.read_text(encoding="utf-8"))
    found = []
    if page.language != "en":
        found.append(f"its language is {page.language!r}")
    if not page.title.strip():
        found.append("it has no title")
    if page.levels.count(1) != 1:
        found.append(f"it has {page.levels.count(1)} headings of the first level")
    if any(below > above + 1 for above, below in itertools.pairwise(page.levels)):
        found.append(f"its headings skip a level: {page.levels}")
    found += [f"a picture's text is {text!r}" for text in page.pictures if len(text) < 10]
    found += [f"{name!r} is there twice" for name in {name for name in page.ids if page.ids.count(name) > 1}]
    found += [f"nothing is at #{target}" for target in page.targets if target and target not in page.ids]
    return found

"""An HTML page as a browser takes it: its tags, texts, and what it would fetch."""

from html.parser import HTMLParser


class Parsed(HTMLParser):
    """Tags that are open at the end, all tags, what is fetched, scripts and texts."""

    VOID = ("meta", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.scripts, self.images = [], [], {}, 0
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        self.images += tag == "img"
        source = given.get("src") or given.get("href") or ""
        if source and not source.startswith(("data:image/svg+xml;base64,", "#")):
            self.fetched.append(source)
        if tag not in self.VOID:
            self.open.append((tag, given.get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[self.open[-1][1]] = data
        elif data.strip():
            self.texts.append(data.strip())

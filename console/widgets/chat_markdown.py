"""Markdown that grows at its end without the screen being laid out anew for every word."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownParagraph  # Textual names it nowhere else


class SteadyParagraph(MarkdownParagraph):
    """A paragraph that asks for a new layout only where it has become taller."""

    def set_content(self, content: Content) -> None:
        """Show this text."""
        self._content = content
        self.update(content, layout=False)
        width = self.size.width
        if not width or self.get_content_height(self.container_size, self.app.size, width) != self.size.height:
            self.refresh(layout=True)


class ChatMarkdown(Markdown):
    """Markdown whose last paragraph may grow."""

    BLOCKS = Markdown.BLOCKS | {"paragraph_open": SteadyParagraph}

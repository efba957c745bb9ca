"""Markdown that grows at its end without the screen being laid out anew for every word."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Markdown
from textual.widgets._markdown import (  # Textual names them nowhere else
    MarkdownBlock,
    MarkdownBulletList,
    MarkdownListItem,
    MarkdownOrderedList,
    MarkdownParagraph,
)


class SteadyParagraph(MarkdownParagraph):
    """A paragraph that asks for a new layout only where it has become taller."""

    def set_content(self, content: Content) -> None:
        """Show this text."""
        self._content = content
        self.update(content, layout=False)
        width = self.size.width
        if width and self.get_content_height(self.container_size, self.app.size, width) != self.size.height:
            self.refresh(layout=True)


class SteadyBulletList(MarkdownBulletList):
    """A list that keeps its items as long as only the last one grows."""

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not _grew_in_its_last_item(self, block):
            await super()._update_from_block(block)


class SteadyOrderedList(MarkdownOrderedList):
    """The same for numbers."""

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not _grew_in_its_last_item(self, block):
            await super()._update_from_block(block)


class ChatMarkdown(Markdown):
    """Markdown whose last paragraph, or item of a list, may grow."""

    BLOCKS = Markdown.BLOCKS | {
        "paragraph_open": SteadyParagraph,
        "bullet_list_open": SteadyBulletList,
        "ordered_list_open": SteadyOrderedList,
    }


def _grew_in_its_last_item(shown: MarkdownBlock, block: MarkdownBlock) -> bool:
    """Whether `block` is the list that is shown but for its last item, a plain paragraph; then that is shown now."""
    items = [item for item in block._blocks if isinstance(item, MarkdownListItem)]
    if type(block) is not type(shown) or not items or len(items) != len(shown.children):
        return False
    paragraphs = list(shown.children[-1].query(MarkdownBlock))
    if [type(each) for each in (*paragraphs, *items[-1]._blocks)] != [SteadyParagraph, SteadyParagraph]:
        return False
    paragraph, grown = paragraphs[0], items[-1]._blocks[0]
    paragraph.set_content(grown._content)
    paragraph._copy_context(grown)
    shown._copy_context(block)
    return True
